-- The mailbox: the durable truth about every job's chain of ops and every sampling request, on one Redis primary.
-- One script, so that each call is atomic. ARGV[1] names a function below; the rest are its arguments.
-- `mailbox.py` beside this file is the only caller. Celery messages are deliveries; losing or doubling one is harmless.
--
-- Keys (P = "lorry:"):
--   P jobs                       ZSET  job -> created ms
--   P job:<job>                  HASH  state active|failed|closed, model, spec, owner, epoch, committed, released,
--                                      snapshot, snapshot_ref, previous_snapshot, previous_ref, incomplete, window,
--                                      max_ops, max_bytes, queued_bytes, cost_ms, last_commit, created, why, session,
--                                      suspect (the last of them), accuser (whose death made them so), absolved
--                                      (where the chain was then), restore_deaths
--   P job:<job>:ops              HASH  seq -> kombu envelope, kept until the previous snapshot covers it (the
--                                      journal); "-" where the op left no effect, "!" where it dropped the gradients
--   P job:<job>:payloads         HASH  seq -> request bytes, kept as long as the envelope
--   P job:<job>:ledger           HASH  seq -> 16 bytes of digest, then JSON: what became of the op; of the last 500 and those to come
--   P job:<job>:cancelled        HASH  seq -> JSON {task, meta, channel, poisons}
--   P unplaced:<model>           ZSET  job -> since µs            jobs with work and no worker
--   P queue:<worker>             LIST  the Celery queue that only this worker incarnation consumes
--   P workers:alive              ZSET  worker -> lease end ms
--   P workers:dead               ZSET  worker -> fenced at ms     never comes back under this name
--   P workers:slots:<model>      ZSET  worker -> free job slots
--   P workers:seats:<model>      ZSET  worker -> free seats for sampling requests
--   P worker:<worker>            HASH  model, info (JSON), started, trying, drain
--   P worker:<worker>:jobs       SET
--   P worker:<worker>:requests   SET
--   P request:<id>               HASH  model, envelope, payload, digest, owner, channel, deaths, accuser, absolved
--   P waiting:<model>            ZSET  request -> since ms        requests with no free seat
--   P sessions                   ZSET  session -> last heartbeat ms;  P session:<session> SET of its jobs
--   P closed                     ZSET  job -> closed ms: gone here, but a worker still has to delete its snapshots
--   P bytes                      number: the payload bytes of all jobs and requests together
--   P models                     HASH  model -> info (JSON)       every model that a worker ever served here
--   P checkpoints                HASH  path -> JSON; an index of the store, which is the truth
--   P tokenizer:<sha256>         the files of a model's tokenizer
--   P output:<task>              bytes of a large result; celery-task-meta-<task>: Celery's own result record

local P, R = 'lorry:', redis.call
local META = 'celery-task-meta-'

local function job_key(job) return P .. 'job:' .. job end
local function now_ms() local t = R('TIME'); return t[1] * 1000 + math.floor(t[2] / 1000) end
local function whole(n) return string.format('%.0f', n) end
-- For places in a line: two jobs often come in the same millisecond.
local function now_us() local t = R('TIME'); return whole(t[1] * 1000000 + t[2]) end

local function is_alive(worker, t)
  local lease_end = R('ZSCORE', P .. 'workers:alive', worker)
  return lease_end and tonumber(lease_end) > t
end

-- Write a result where Celery's Redis backend would, and tell the client's listener and any AsyncResult.get().
local function publish_result(task, meta, output, ttl, channel)
  if output ~= '' then R('SET', P .. 'output:' .. task, output, 'EX', ttl) end
  R('SET', META .. task, meta, 'EX', ttl)
  R('PUBLISH', META .. task, meta)
  if channel ~= '' then R('PUBLISH', channel, meta) end
end

local function republish(task, channel)
  local meta = R('GET', META .. task)
  if meta and channel ~= '' then R('PUBLISH', channel, meta) end
end

-- The live worker with the most free places in this ZSET; `avoid` only if there is no other.
local function pick_worker(places, avoid)
  local t, fallback = now_ms(), nil
  local found = R('ZREVRANGEBYSCORE', places, '+inf', '(0', 'LIMIT', 0, 16)
  for _, worker in ipairs(found) do
    if is_alive(worker, t) then
      if worker ~= avoid then return worker end
      fallback = worker
    end
  end
  return fallback
end

-- A freed place goes back to a worker that still takes work, and to no other.
local function give_back(places, worker) R('ZADD', places, 'XX', 'INCR', 1, worker) end

---------------------------------------------------------------------------------------------------------- chains

-- The fencing token grows with the server's clock too, so that it never repeats even if a failover lost increments.
local function raise_epoch(job)
  local epoch = math.max(tonumber(R('HGET', job_key(job), 'epoch')) + 1, now_ms())
  R('HSET', job_key(job), 'epoch', whole(epoch))
end

local function disown(job)
  raise_epoch(job)
  R('HSET', job_key(job), 'owner', '', 'released', R('HGET', job_key(job), 'committed'))
end

-- Give the job to a worker, unless others have been waiting for one for longer: whatever frees a slot calls
-- `place_waiting`, so while there are such jobs there is no slot.
local function place(job, model, avoid)
  local waiting = P .. 'unplaced:' .. model
  R('ZADD', waiting, 'NX', now_us(), job)
  local worker = R('ZRANK', waiting, job) == 0 and pick_worker(P .. 'workers:slots:' .. model, avoid)
  if not worker then return nil end
  R('ZREM', waiting, job)
  R('ZINCRBY', P .. 'workers:slots:' .. model, -1, worker)
  R('SADD', P .. 'worker:' .. worker .. ':jobs', job)
  raise_epoch(job)
  R('HSET', job_key(job), 'owner', worker, 'released', R('HGET', job_key(job), 'committed'))
  return worker
end

local function drop_payload(job, seq)
  local size = R('HSTRLEN', job_key(job) .. ':payloads', seq)
  R('HDEL', job_key(job) .. ':payloads', seq)
  if size > 0 then
    R('HINCRBY', job_key(job), 'queued_bytes', -size)
    R('DECRBY', P .. 'bytes', size)
  end
end

-- The ledger says of every op what became of it. `entry` is a JSON object without the times that only Redis knows.
-- -> when the op was queued
local LEDGER_LENGTH = 500
local MAX_WINDOW = 16
local function write_ledger(job, seq, entry)
  local key = job_key(job) .. ':ledger'
  local known = R('HGET', key, seq)
  if not known then return 0 end
  local queued = string.match(known, '"queued":(%d+)', 17) or '0'
  local times = '{"queued":' .. queued .. ',"committed":' .. whole(now_ms()) .. ','
  R('HSET', key, seq, string.sub(known, 1, 16) .. times .. string.sub(entry, 2))
  if seq > LEDGER_LENGTH then R('HDEL', key, seq - LEDGER_LENGTH) end
  return tonumber(queued)
end

-- Resolve cancelled ops that have reached the head of the chain. They count as committed and leave no effect.
local function pass_cancelled(job, ttl)
  local k = job_key(job)
  while true do
    local committed, released = unpack(R('HMGET', k, 'committed', 'released'))
    local seq = tonumber(committed) + 1
    local entry = R('HGET', k .. ':cancelled', seq)
    if not entry or tonumber(released) >= seq then return end
    local c = cjson.decode(entry)
    R('HSET', k, 'committed', seq, 'released', seq)
    if c.poisons and R('HGET', k, 'incomplete') == '' then R('HSET', k, 'incomplete', seq) end
    R('HSET', k .. ':ops', seq, '-')
    R('HDEL', k .. ':cancelled', seq)
    drop_payload(job, seq)
    write_ledger(job, seq, '{"status":"cancelled"}')
    publish_result(c.task, c.meta, '', ttl, c.channel)
  end
end

-- Are there chunks of an update out whose optim_step is not? So far the window grows, so that one cycle can take all.
local function grows(k, committed, released)
  if released >= committed + MAX_WINDOW then return false end
  return string.find(R('HGET', k .. ':ops', released) or '', '"lorry.forward', 1, true) ~= nil
end

-- Deliver up to `window` uncommitted ops to the owner's queue, and whole updates; find an owner first if there is none.
local function release(job, avoid)
  local k = job_key(job)
  local owner, committed, released, window, model =
    unpack(R('HMGET', k, 'owner', 'committed', 'released', 'window', 'model'))
  committed, released, window = tonumber(committed), tonumber(released), tonumber(window)
  if owner == '' then
    if R('HEXISTS', k .. ':ops', committed + 1) == 0 then
      R('ZREM', P .. 'unplaced:' .. model, job)
      return 0
    end
    owner = place(job, model, avoid)
    if not owner then return 0 end
    released = committed
  end
  local count = 0
  while released < committed + window or grows(k, committed, released) do
    local envelope = R('HGET', k .. ':ops', released + 1)
    if not envelope or R('HEXISTS', k .. ':cancelled', released + 1) == 1 then break end
    R('LPUSH', P .. 'queue:' .. owner, envelope)
    released = released + 1
    count = count + 1
  end
  if count > 0 then R('HSET', k, 'released', released) end
  return count
end

-- There may be room: the job that has waited longest goes first.
local function place_waiting(model)
  local waiting = P .. 'unplaced:' .. model
  for _ = 1, 64 do
    local job = R('ZRANGE', waiting, 0, 0)[1]
    if not job then return end
    release(job)
    if R('ZRANK', waiting, job) then return end
  end
end

-- The owner's slot is free again. (The job itself is to be disowned or deleted.)
local function free_slot(job, owner, model)
  if owner ~= '' and R('SREM', P .. 'worker:' .. owner .. ':jobs', job) == 1 then
    give_back(P .. 'workers:slots:' .. model, owner)
  end
end

-- Fail everything that is queued on a failed job, in order, without running it. What was cancelled stays cancelled.
local function drain_failed(job, template, ttl)
  local k = job_key(job)
  while true do
    pass_cancelled(job, ttl)
    local seq = tonumber(R('HGET', k, 'committed')) + 1
    local envelope = R('HGET', k .. ':ops', seq)
    if not envelope then break end
    local headers = cjson.decode(envelope).headers
    local meta = cjson.decode(template)
    meta.task_id = headers.id
    meta.traceback, meta.children = cjson.null, cjson.null
    R('HSET', k, 'committed', seq, 'released', seq)
    R('HDEL', k .. ':ops', seq)
    drop_payload(job, seq)
    write_ledger(job, seq, '{"status":"job_failed"}')
    publish_result(headers.id, cjson.encode(meta), '', ttl, headers.lorry_channel or '')
  end
end

-- Is this caller still the owner? Every write by a worker goes through this fence.
local function owns(job, worker, epoch)
  local h = R('HMGET', job_key(job), 'owner', 'epoch')
  return h[1] == worker and h[2] == epoch
end

-------------------------------------------------------------------------------- ops and requests that kill workers

-- A result record for an error that the mailbox itself found out about.
local function crash_meta(task, message, job, op, seq)
  return cjson.encode({
    status = 'FAILURE', task_id = task, traceback = cjson.null, children = cjson.null,
    result = {
      exc_type = 'WorkerCrashed', exc_module = 'lorry_jobs.errors', exc_message = { message },
      lorry = { code = 'worker_crashed', message = message, job = job, op = op, seq = seq },
    },
  })
end

-- The head of this job's chain has taken two workers down: it fails alone, and the job goes on.
local function fail_head(job, seq, worker, ttl)
  local k = job_key(job)
  local headers = cjson.decode(R('HGET', k .. ':ops', seq)).headers
  local op = string.gsub(headers.task, '^lorry%.', '')
  local message = 'two workers died while they ran this op (the last was ' .. worker .. '); it is not tried again. ' ..
    'The log of that worker says why: often it ran out of memory, and a smaller batch fits. The job goes on'
  R('HSET', k, 'committed', seq, 'released', seq)
  if op == 'forward_backward' and R('HGET', k, 'incomplete') == '' then R('HSET', k, 'incomplete', seq) end
  -- As for any step that fails: its gradients go with it.
  if op == 'optim_step' then R('HSET', k, 'incomplete', '') end
  R('HSET', k .. ':ops', seq, op == 'optim_step' and '!' or '-')
  drop_payload(job, seq)
  write_ledger(job, seq, cjson.encode({ status = 'worker_crashed', op = op, worker = worker, attempt = 2 }))
  publish_result(headers.id, crash_meta(headers.id, message, job, op, seq), '', ttl, headers.lorry_channel or '')
end

-- Workers died while they rebuilt this job's state, before any op of it ran: nobody else is to try.
local function fail_unrestorable(job, worker, ttl)
  local message = 'workers died while they rebuilt the state of this job (the last was ' .. worker .. '); it is ' ..
    'not tried again. The log of that worker says why. Create a new client from a checkpoint'
  local template = crash_meta('', message, job, cjson.null, cjson.null)
  R('HSET', job_key(job), 'state', 'failed', 'why', template)
  drain_failed(job, template, ttl)
end

-- A worker died with this job. The first time, all that it had been given become suspects (the last commits may have
-- been on their way, so it need not have died of the first): workers run suspects one at a time and say so before. The
-- second time, only the one that was really running is to blame.
local function blame(job, worker, trying, ttl)
  local k = job_key(job)
  if trying == 'restore ' .. job and R('HINCRBY', k, 'restore_deaths', 1) >= 2 then
    fail_unrestorable(job, worker, ttl)
  end
  local committed, released, suspect = unpack(R('HMGET', k, 'committed', 'released', 'suspect'))
  local head = tonumber(committed) + 1
  released, suspect = tonumber(released), tonumber(suspect) or -1
  if released < head or R('HEXISTS', k .. ':ops', head) == 0 then return end
  R('HSET', k, 'suspect', math.max(released, suspect), 'accuser', worker)
  if trying == job and head <= suspect then fail_head(job, head, worker, ttl) end
end

-------------------------------------------------------------------------------------------------- sampling requests

local function seat(id, avoid)
  local k = P .. 'request:' .. id
  local model, envelope = unpack(R('HMGET', k, 'model', 'envelope'))
  local worker = pick_worker(P .. 'workers:seats:' .. model, avoid)
  if not worker then
    R('ZADD', P .. 'waiting:' .. model, 'NX', now_us(), id)
    return false
  end
  R('ZREM', P .. 'waiting:' .. model, id)
  R('ZINCRBY', P .. 'workers:seats:' .. model, -1, worker)
  R('SADD', P .. 'worker:' .. worker .. ':requests', id)
  R('HSET', k, 'owner', worker)
  R('LPUSH', P .. 'queue:' .. worker, envelope)
  return true
end

local function drop_request(id)
  R('DECRBY', P .. 'bytes', R('HSTRLEN', P .. 'request:' .. id, 'payload'))
  R('DEL', P .. 'request:' .. id)
end

local function seat_waiting(model)
  for _, id in ipairs(R('ZRANGE', P .. 'waiting:' .. model, 0, 63)) do
    if R('EXISTS', P .. 'request:' .. id) == 0 then
      R('ZREM', P .. 'waiting:' .. model, id)
    elseif not seat(id) then
      return
    end
  end
end

local F = {}

---------------------------------------------------------------------------------------------- called by clients

-- -> ok | dup | conflict.  A job starts at committed = -1; its create_model is op 0.
function F.create(job, model, spec, window, max_ops, max_bytes, session)
  local k = job_key(job)
  if R('EXISTS', k) == 1 then
    local h = R('HMGET', k, 'model', 'spec')
    return (h[1] == model and h[2] == spec) and 'dup' or 'conflict'
  end
  local t = now_ms()
  R('HSET', k, 'state', 'active', 'model', model, 'spec', spec, 'owner', '', 'epoch', 0, 'committed', -1,
    'released', -1, 'snapshot', -1, 'snapshot_ref', '', 'previous_snapshot', -1, 'previous_ref', '', 'incomplete', '',
    'window', window, 'max_ops', max_ops, 'max_bytes', max_bytes, 'queued_bytes', 0,
    'cost_ms', 0, 'last_commit', 0, 'created', whole(t), 'why', '',
    'session', session, 'suspect', '', 'restore_deaths', 0)
  R('ZADD', P .. 'jobs', t, job)
  R('SADD', P .. 'session:' .. session, job)
  R('ZADD', P .. 'sessions', 'NX', t, session)
  return 'ok'
end

-- -> ok | dup | conflict | full | closed | failed | nojob.  Safe to repeat.
function F.submit(job, seq, envelope, payload, digest, task, channel, ttl, max_total)
  local k = job_key(job)
  local state, committed, max_ops, max_bytes, queued, why =
    unpack(R('HMGET', k, 'state', 'committed', 'max_ops', 'max_bytes', 'queued_bytes', 'why'))
  if not state then return 'nojob' end
  seq, committed = tonumber(seq), tonumber(committed)
  if seq < 0 then return 'conflict' end
  local known = R('HGET', k .. ':ledger', seq)
  if known then
    if string.sub(known, 1, 16) ~= digest then return 'conflict' end
    if seq <= committed then republish(task, channel) end
    return 'dup'
  end
  if seq <= committed then  -- so long ago that the ledger has forgotten its digest
    republish(task, channel)
    return 'dup'
  end
  if state == 'closed' then return 'closed' end
  -- The next op is always taken, so that a bound can slow a job down but never wedge it.
  local total = tonumber(R('GET', P .. 'bytes') or 0)
  local room = seq - committed <= tonumber(max_ops) and tonumber(queued) + #payload <= tonumber(max_bytes)
    and total + #payload <= tonumber(max_total)
  if not room and seq ~= committed + 1 then return 'full' end
  R('HSET', k .. ':ops', seq, envelope)
  R('HSET', k .. ':payloads', seq, payload)
  R('HSET', k .. ':ledger', seq, digest .. '{"queued":' .. whole(now_ms()) .. '}')
  R('HINCRBY', k, 'queued_bytes', #payload)
  R('INCRBY', P .. 'bytes', #payload)
  if state == 'failed' then
    drain_failed(job, why, ttl)
    return 'failed'
  end
  release(job)
  return 'ok'
end

-- -> cancelled | late.  Only an op that was not handed to a worker can be cancelled.
function F.cancel(job, seq, task, meta, channel, poisons, ttl)
  local k = job_key(job)
  local released = R('HGET', k, 'released')
  if not released or tonumber(seq) <= tonumber(released) then return 'late' end
  if R('HEXISTS', k .. ':ops', seq) == 0 then return 'late' end
  R('HSET', k .. ':cancelled', seq,
    cjson.encode({ task = task, meta = meta, channel = channel, poisons = poisons == '1' }))
  pass_cancelled(job, ttl)
  release(job)
  return 'cancelled'
end

-- -> JSON that tells a waiting client what it waits for.
function F.status(job)
  local k = job_key(job)
  local h = R('HMGET', k, 'state', 'model', 'owner', 'committed', 'released', 'cost_ms', 'queued_bytes', 'incomplete')
  if not h[1] then return cjson.encode({ state = 'unknown' }) end
  local t, workers = now_ms(), 0
  for _, worker in ipairs(R('ZRANGE', P .. 'workers:slots:' .. h[2], 0, -1)) do
    if is_alive(worker, t) then workers = workers + 1 end
  end
  local owner = h[3]
  return cjson.encode({
    state = h[1], model = h[2], owner = owner, committed = tonumber(h[4]), released = tonumber(h[5]),
    cost_ms = tonumber(h[6]), queued_bytes = tonumber(h[7]), workers = workers,
    owner_alive = owner ~= '' and is_alive(owner, t) or false,
    ahead_unplaced = R('ZRANK', P .. 'unplaced:' .. h[2], job) or -1,
  })
end

-- -> ok | dup | conflict | full.  An unordered request; safe to repeat.
function F.request(id, model, envelope, payload, digest, channel, max_total)
  local k = P .. 'request:' .. id
  local known = R('HGET', k, 'digest')
  if known then return known == digest and 'dup' or 'conflict' end
  if R('EXISTS', META .. id) == 1 then
    republish(id, channel)
    return 'dup'
  end
  -- As with ops: the bound slows down, but what nobody waits before is always taken.
  local total = tonumber(R('GET', P .. 'bytes') or 0)
  if total + #payload > tonumber(max_total) and R('EXISTS', P .. 'waiting:' .. model) == 1 then return 'full' end
  R('INCRBY', P .. 'bytes', #payload)
  R('HSET', k, 'model', model, 'envelope', envelope, 'payload', payload, 'digest', digest, 'owner', '',
    'channel', channel, 'deaths', 0)
  seat(id)
  return 'ok'
end

function F.request_status(id)
  local k = P .. 'request:' .. id
  local model, owner = unpack(R('HMGET', k, 'model', 'owner'))
  if not model then return cjson.encode({ state = 'unknown' }) end
  local t, workers = now_ms(), 0
  for _, worker in ipairs(R('ZRANGE', P .. 'workers:seats:' .. model, 0, -1)) do
    if is_alive(worker, t) then workers = workers + 1 end
  end
  return cjson.encode({
    state = 'active', model = model, owner = owner, workers = workers,
    ahead = R('ZRANK', P .. 'waiting:' .. model, id) or -1,
  })
end

-- -> cancelled | late.  A request that no worker holds yet.
function F.cancel_request(id, meta, channel, ttl)
  local k = P .. 'request:' .. id
  local model, owner = unpack(R('HMGET', k, 'model', 'owner'))
  if not model or owner ~= '' then return 'late' end
  R('ZREM', P .. 'waiting:' .. model, id)
  drop_request(id)
  publish_result(id, meta, '', ttl, channel)
  return 'cancelled'
end

-- Drop everything of a job but its results and checkpoints.
function F.close(job)
  local k = job_key(job)
  local owner, model, queued, session = unpack(R('HMGET', k, 'owner', 'model', 'queued_bytes', 'session'))
  if not owner then return 'nojob' end
  R('DECRBY', P .. 'bytes', queued)
  R('SREM', P .. 'session:' .. session, job)
  R('ZREM', P .. 'unplaced:' .. model, job)
  R('ZREM', P .. 'jobs', job)
  R('DEL', k, k .. ':ops', k .. ':payloads', k .. ':ledger', k .. ':cancelled')
  R('ZADD', P .. 'closed', now_ms(), job)
  free_slot(job, owner, model)
  place_waiting(model)
  return 'ok'
end

-- A client process says that it is there, and so are its jobs.
function F.heartbeat(session) R('ZADD', P .. 'sessions', now_ms(), session) return 'ok' end

-- The client is done with its jobs: they go at the next reaping, without waiting for the heartbeat to grow old.
function F.end_session(session) R('ZADD', P .. 'sessions', 0, session) return 'ok' end

-- -> jobs that were closed so long ago that nobody writes snapshots of them any more
function F.closed_jobs(age_ms) return R('ZRANGEBYSCORE', P .. 'closed', '-inf', now_ms() - tonumber(age_ms)) end

-- The store holds nothing of these closed jobs any more.
function F.forget_closed(...) return R('ZREM', P .. 'closed', ...) end

-- Has this job's next op waited for a worker for so long that even its result would be gone by now?
local function is_abandoned(job, committed, patience_ms)
  if R('HGET', job_key(job), 'owner') ~= '' then return false end
  local entry = R('HGET', job_key(job) .. ':ledger', committed + 1)
  local queued = entry and string.match(entry, '"queued":(%d+)', 17)
  return queued ~= nil and now_ms() - tonumber(queued) > tonumber(patience_ms)
end

-- Drop the jobs of sessions without a heartbeat for so long, once their ops are done, or have waited in vain for
-- `patience_ms` because nobody serves their model any more. -> the jobs that went
function F.reap_sessions(timeout_ms, limit, patience_ms)
  local gone = {}
  for _, session in ipairs(R('ZRANGEBYSCORE', P .. 'sessions', '-inf', now_ms() - tonumber(timeout_ms), 'LIMIT', 0, limit)) do
    local jobs = R('SMEMBERS', P .. 'session:' .. session)
    local left = #jobs
    for _, job in ipairs(jobs) do
      local committed = R('HGET', job_key(job), 'committed')
      if not committed or R('HEXISTS', job_key(job) .. ':ops', tonumber(committed) + 1) == 0
        or is_abandoned(job, tonumber(committed), patience_ms) then
        if committed then F.close(job) else R('SREM', P .. 'session:' .. session, job) end
        gone[#gone + 1] = job
        left = left - 1
      end
    end
    if left == 0 then
      R('ZREM', P .. 'sessions', session)
      R('DEL', P .. 'session:' .. session)
    end
  end
  return gone
end

---------------------------------------------------------------------------------------------- called by workers

-- Register, or renew the lease. -> ok | drain | dead.  A fenced worker must come back under a new name.
function F.hello(worker, model, slots, seats, lease_ms, info, model_info)
  local t = now_ms()
  if R('ZSCORE', P .. 'workers:dead', worker) then return 'dead' end
  R('ZADD', P .. 'workers:alive', t + tonumber(lease_ms), worker)
  if R('EXISTS', P .. 'worker:' .. worker) == 0 then
    R('HSET', P .. 'worker:' .. worker, 'model', model, 'started', whole(t))
    R('ZADD', P .. 'workers:slots:' .. model, slots, worker)
    R('ZADD', P .. 'workers:seats:' .. model, seats, worker)
    R('HSET', P .. 'models', model, model_info)
  end
  R('HSET', P .. 'worker:' .. worker, 'info', info)
  if R('HEXISTS', P .. 'worker:' .. worker, 'drain') == 1 then return 'drain' end
  place_waiting(model)
  seat_waiting(model)
  return 'ok'
end

-- A worker that was declared dead lives: it was frozen or cut off, so nothing that it ran has killed it. It names the
-- jobs and requests that it held. Once only for the same op: one that freezes every worker must be found out.
function F.absolve(worker, ...)
  for _, id in ipairs({ ... }) do
    local k, request = job_key(id), P .. 'request:' .. id
    local accuser, committed, absolved = unpack(R('HMGET', k, 'accuser', 'committed', 'absolved'))
    if accuser == worker and absolved ~= committed then
      R('HSET', k, 'suspect', '', 'accuser', '', 'absolved', committed, 'restore_deaths', 0)
    end
    accuser, absolved = unpack(R('HMGET', request, 'accuser', 'absolved'))
    if accuser == worker and not absolved then R('HSET', request, 'deaths', 0, 'accuser', '', 'absolved', 1) end
  end
  return 'ok'
end

-- A worker stops taking new jobs and requests (it still commits what it holds).
function F.close_doors(worker)
  local model = R('HGET', P .. 'worker:' .. worker, 'model')
  if not model then return 'gone' end
  R('ZREM', P .. 'workers:slots:' .. model, worker)
  R('ZREM', P .. 'workers:seats:' .. model, worker)
  return 'ok'
end

-- An operator asks a worker to leave. It hears of it when it next renews its lease. -> ok | unknown
function F.drain(worker)
  if F.close_doors(worker) == 'gone' then return 'unknown' end
  R('HSET', P .. 'worker:' .. worker, 'drain', 1)
  return 'ok'
end

-- A worker says which suspect it is about to run (a job, or a sampling request), or whose state it is about to
-- rebuild ('restore <job>'); '' when it is done.
function F.trying(worker, what)
  if R('EXISTS', P .. 'worker:' .. worker) == 0 then return 'gone' end
  R('HSET', P .. 'worker:' .. worker, 'trying', what)
  return 'ok'
end

-- What a worker needs to adopt a job it was handed: the whole record, if it is the owner. -> {} | {field, value, ...}
function F.adopt(job, worker)
  if R('HGET', job_key(job), 'owner') ~= worker then return {} end
  return R('HGETALL', job_key(job))
end

-- -> {the request's bytes, committed, incomplete} | false.  Ops of a job that moved on are not handed out again.
-- The last two tell the owner of ops that were cancelled: they are committed without having come its way.
function F.take(job, seq, worker)
  local owner, committed, incomplete = unpack(R('HMGET', job_key(job), 'owner', 'committed', 'incomplete'))
  if owner ~= worker or tonumber(seq) <= tonumber(committed) then return false end
  local payload = R('HGET', job_key(job) .. ':payloads', seq)
  return payload and { payload, committed, incomplete }
end

-- -> ok | dup | stale | gap.  incomplete: '-' keep, '' clear, else the seq whose gradients are missing.
-- effect '1': a replay runs the op again, '0': it changed nothing and is skipped, 'drop': it dropped the gradients.
-- entry: the op's line in the ledger.
function F.commit(job, seq, worker, epoch, task, meta, output, ttl, channel, incomplete, effect, entry)
  local k = job_key(job)
  if not owns(job, worker, epoch) then return 'stale' end
  seq = tonumber(seq)
  local committed, cost, last_commit, suspect =
    unpack(R('HMGET', k, 'committed', 'cost_ms', 'last_commit', 'suspect'))
  committed = tonumber(committed)
  if seq <= committed then return 'dup' end
  if seq ~= committed + 1 then return 'gap' end
  if suspect ~= '' then
    R('HSET', P .. 'worker:' .. worker, 'trying', '')
    if seq >= tonumber(suspect) then R('HSET', k, 'suspect', '', 'restore_deaths', 0) end
  end
  local queued = write_ledger(job, seq, entry)
  if incomplete ~= '-' then R('HSET', k, 'incomplete', incomplete) end
  if effect ~= '1' then
    R('HSET', k .. ':ops', seq, effect == 'drop' and '!' or '-')
    drop_payload(job, seq)
  end
  -- For the ETA a waiting client is told: the mean time of an op at the head of this chain, and so with the other
  -- jobs' share of the worker in it. It could not be there before its worker had the job, which the epoch dates.
  local t = now_ms()
  if seq > 0 then
    local since = math.max(tonumber(last_commit), queued, tonumber(epoch))
    local weight = math.max(0.1, 1 / seq)
    cost = tonumber(cost) * (1 - weight) + math.max(0, t - since) * weight
  end
  R('HSET', k, 'committed', seq, 'last_commit', whole(t), 'cost_ms', string.format('%.1f', cost))
  publish_result(task, meta, output, ttl, channel)
  pass_cancelled(job, ttl)
  release(job)
  return 'ok'
end

-- -> ok | dup | stale
function F.finish_request(id, worker, meta, output, ttl, channel)
  local k = P .. 'request:' .. id
  local model, owner = unpack(R('HMGET', k, 'model', 'owner'))
  if not model then return 'dup' end
  if owner ~= worker then return 'stale' end
  if R('HGET', k, 'deaths') ~= '0' then R('HSET', P .. 'worker:' .. worker, 'trying', '') end
  drop_request(id)
  if R('SREM', P .. 'worker:' .. worker .. ':requests', id) == 1 then
    give_back(P .. 'workers:seats:' .. model, worker)
  end
  publish_result(id, meta, output, ttl, channel)
  seat_waiting(model)
  return 'ok'
end

-- -> {payload, deaths} | false
function F.take_request(id, worker)
  local owner, payload, deaths = unpack(R('HMGET', P .. 'request:' .. id, 'owner', 'payload', 'deaths'))
  if owner ~= worker then return false end
  return { payload, deaths }
end

-- Move the snapshot pointer. The one before is kept, and with it the journal since, so that a snapshot that cannot be
-- read is no loss; what only the one before that needed is freed. -> {stale | gap | old} | {ok, the freed ref, the kept one's}
function F.snapshot(job, worker, epoch, seq, ref)
  local k = job_key(job)
  if not owns(job, worker, epoch) then return { 'stale' } end
  local committed, last, last_ref, previous, previous_ref =
    unpack(R('HMGET', k, 'committed', 'snapshot', 'snapshot_ref', 'previous_snapshot', 'previous_ref'))
  seq = tonumber(seq)
  if seq > tonumber(committed) then return { 'gap' } end
  if seq < tonumber(last) then return { 'old' } end
  R('HSET', k, 'snapshot', seq, 'snapshot_ref', ref, 'previous_snapshot', last, 'previous_ref', last_ref)
  for s = tonumber(previous) + 1, tonumber(last) do
    R('HDEL', k .. ':ops', s)
    drop_payload(job, s)
  end
  return { 'ok', previous_ref ~= last_ref and previous_ref or '', last_ref }
end

-- The owner could not read the last snapshot, but the one before and the journal since: that one is the last now.
function F.distrust(job, worker, epoch, ref)
  local k = job_key(job)
  if not owns(job, worker, epoch) then return 'stale' end
  if R('HGET', k, 'snapshot_ref') ~= ref then return 'old' end
  R('HSET', k, 'snapshot', R('HGET', k, 'previous_snapshot'), 'snapshot_ref', R('HGET', k, 'previous_ref'))
  return 'ok'
end

-- Deliver again what is released and uncommitted: repairs lost Celery messages. The arguments after the worker are
-- job, epoch, job, epoch, ...  -> those jobs that are another's now
function F.resend(worker, ...)
  local stale, pairs_given = {}, { ... }
  for i = 1, #pairs_given, 2 do
    local job = pairs_given[i]
    local k = job_key(job)
    local owner, epoch, committed, released = unpack(R('HMGET', k, 'owner', 'epoch', 'committed', 'released'))
    if owner ~= worker or epoch ~= pairs_given[i + 1] then
      stale[#stale + 1] = job
    elseif tonumber(released) > tonumber(committed) then
      R('HSET', k, 'released', committed)
      release(job)
    end
  end
  return stale
end

function F.resend_request(id, worker)
  local k = P .. 'request:' .. id
  local owner, envelope = unpack(R('HMGET', k, 'owner', 'envelope'))
  if not owner then
    R('SREM', P .. 'worker:' .. worker .. ':requests', id)
    return 'gone'
  end
  if owner ~= worker then return 'stale' end
  R('LPUSH', P .. 'queue:' .. worker, envelope)
  return 'ok'
end

-- Hand a job back (drain, eviction). -> ok | stale
function F.yield(job, worker, epoch)
  if not owns(job, worker, epoch) then return 'stale' end
  local model = R('HGET', job_key(job), 'model')
  free_slot(job, worker, model)
  disown(job)
  place_waiting(model)  -- before this job, if it has work: it had its turn
  release(job, worker)
  return 'ok'
end

-- Nothing can bring this job's state back: fail what is queued and all that comes; it needs no worker any more.
-- -> ok | stale
function F.fail(job, worker, epoch, template, ttl)
  if not owns(job, worker, epoch) then return 'stale' end
  R('HSET', job_key(job), 'state', 'failed', 'why', template)
  drain_failed(job, template, ttl)
  local model = R('HGET', job_key(job), 'model')
  free_slot(job, worker, model)
  disown(job)
  place_waiting(model)
  return 'ok'
end

-- Take a worker out of service: no new jobs or requests, those it holds go elsewhere. Used for the dead and the leaving.
local function retire(worker, limit, died, ttl)
  local model, trying = unpack(R('HMGET', P .. 'worker:' .. worker, 'model', 'trying'))
  local moved = 0
  if model then
    R('ZREM', P .. 'workers:slots:' .. model, worker)
    R('ZREM', P .. 'workers:seats:' .. model, worker)
  end
  for _, job in ipairs(R('SPOP', P .. 'worker:' .. worker .. ':jobs', limit)) do
    if R('HGET', job_key(job), 'owner') == worker then
      if died then blame(job, worker, trying, ttl) end
      disown(job)
      pass_cancelled(job, ttl)
      release(job)
      moved = moved + 1
    end
  end
  for _, id in ipairs(R('SPOP', P .. 'worker:' .. worker .. ':requests', limit)) do
    local k = P .. 'request:' .. id
    local owner, deaths, channel, envelope = unpack(R('HMGET', k, 'owner', 'deaths', 'channel', 'envelope'))
    if owner == worker then
      local op = string.gsub(cjson.decode(envelope).headers.task, '^lorry%.', '')
      -- Only sampling is run alone once it is suspect. What runs beside the clock was there at every death.
      if died and (deaths == '0' or trying == id or op ~= 'sample') then
        deaths = R('HINCRBY', k, 'deaths', 1)
        R('HSET', k, 'accuser', worker)
      end
      if tonumber(deaths) >= 2 then
        local message = 'two workers died while they ' .. (op == 'sample' and 'sampled' or 'worked on') ..
          ' this request (the last was ' .. worker .. '); it is not tried again. The log of that worker says why'
        drop_request(id)
        publish_result(id, crash_meta(id, message, cjson.null, op, cjson.null), '', ttl, channel)
      else
        R('HSET', k, 'owner', '')
        seat(id)
      end
      moved = moved + 1
    end
  end
  if R('SCARD', P .. 'worker:' .. worker .. ':jobs') + R('SCARD', P .. 'worker:' .. worker .. ':requests') == 0 then
    R('ZREM', P .. 'workers:alive', worker)
    local queue = P .. 'queue:' .. worker
    R('DEL', queue, P .. 'worker:' .. worker)
    R('DEL', '_kombu.binding.' .. queue, '_kombu.binding_permanent.' .. queue)  -- kombu's notes about the queue
  end
  return moved
end

-- Anyone may call this: moves the jobs and requests of workers whose lease ran out. -> number moved
function F.reap(limit, ttl)
  local t, moved = now_ms(), 0
  for _, worker in ipairs(R('ZRANGEBYSCORE', P .. 'workers:alive', '-inf', t, 'LIMIT', 0, 4)) do
    R('ZADD', P .. 'workers:dead', t, worker)
    moved = moved + retire(worker, limit, true, ttl)
  end
  R('ZREMRANGEBYSCORE', P .. 'workers:dead', '-inf', t - 86400000)
  return moved
end

-- A worker leaves for good; whatever it still holds goes elsewhere. -> number moved
function F.goodbye(worker, limit)
  R('ZADD', P .. 'workers:dead', now_ms(), worker)
  return retire(worker, limit, false, 86400)
end

return F[ARGV[1]](unpack(ARGV, 2))
