-- The mailbox: the durable truth about every job's chain of ops and every sampling request, on one Redis primary.
-- One script, so that each call is atomic. ARGV[1] names a function below; the rest are its arguments.
-- `mailbox.py` beside this file is the only caller. Celery messages are deliveries; losing or doubling one is harmless.
--
-- Keys (P = "lorry:"):
--   P jobs                       ZSET  job -> created ms
--   P job:<job>                  HASH  state active|failed|closed, model, spec, owner, epoch, committed, released,
--                                      snapshot, snapshot_ref, incomplete, window, max_ops, max_bytes, queued_bytes,
--                                      cost_ms, created, why
--   P job:<job>:ops              HASH  seq -> kombu envelope, kept until a snapshot covers it (the journal);
--                                      "-" where the op left no effect, "!" where it dropped the gradients
--   P job:<job>:payloads         HASH  seq -> request bytes, kept as long as the envelope
--   P job:<job>:digests          HASH  seq -> digest of the request, kept for the life of the job
--   P job:<job>:cancelled        HASH  seq -> JSON {task, meta, channel, poisons}
--   P unplaced:<model>           ZSET  job -> since ms            jobs with work and no worker
--   P queue:<worker>             LIST  the Celery queue that only this worker incarnation consumes
--   P workers:alive              ZSET  worker -> lease end ms
--   P workers:dead               ZSET  worker -> fenced at ms     never comes back under this name
--   P workers:slots:<model>      ZSET  worker -> free job slots
--   P workers:seats:<model>      ZSET  worker -> free seats for sampling requests
--   P worker:<worker>            HASH  model, info (JSON), started
--   P worker:<worker>:jobs       SET
--   P worker:<worker>:requests   SET
--   P request:<id>               HASH  model, envelope, payload, digest, owner, channel, tries
--   P waiting:<model>            ZSET  request -> since ms        requests with no free seat
--   P models                     HASH  model -> info (JSON)       every model that a worker ever served here
--   P checkpoints                HASH  path -> JSON; an index of the store, which is the truth
--   P tokenizer:<sha256>         the files of a model's tokenizer
--   P output:<task>              bytes of a large result; celery-task-meta-<task>: Celery's own result record

local P, R = 'lorry:', redis.call
local META = 'celery-task-meta-'

local function job_key(job) return P .. 'job:' .. job end
local function now_ms() local t = R('TIME'); return t[1] * 1000 + math.floor(t[2] / 1000) end
local function whole(n) return string.format('%.0f', n) end

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

-- The owner gives the job and its slot back.
local function leave(job, worker)
  if R('SREM', P .. 'worker:' .. worker .. ':jobs', job) == 1 then
    give_back(P .. 'workers:slots:' .. R('HGET', job_key(job), 'model'), worker)
  end
  disown(job)
end

local function place(job, model, avoid)
  local worker = pick_worker(P .. 'workers:slots:' .. model, avoid)
  if not worker then
    R('ZADD', P .. 'unplaced:' .. model, 'NX', now_ms(), job)
    return nil
  end
  R('ZINCRBY', P .. 'workers:slots:' .. model, -1, worker)
  R('SADD', P .. 'worker:' .. worker .. ':jobs', job)
  R('ZREM', P .. 'unplaced:' .. model, job)
  raise_epoch(job)
  R('HSET', job_key(job), 'owner', worker, 'released', R('HGET', job_key(job), 'committed'))
  return worker
end

local function drop_payload(job, seq)
  local size = R('HSTRLEN', job_key(job) .. ':payloads', seq)
  R('HDEL', job_key(job) .. ':payloads', seq)
  if size > 0 then R('HINCRBY', job_key(job), 'queued_bytes', -size) end
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
    publish_result(c.task, c.meta, '', ttl, c.channel)
  end
end

-- Deliver up to `window` uncommitted ops to the owner's queue; find an owner first if there is none.
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
  while released < committed + window do
    local envelope = R('HGET', k .. ':ops', released + 1)
    if not envelope or R('HEXISTS', k .. ':cancelled', released + 1) == 1 then break end
    R('LPUSH', P .. 'queue:' .. owner, envelope)
    released = released + 1
    count = count + 1
  end
  if count > 0 then R('HSET', k, 'released', released) end
  return count
end

-- Give free places to the jobs that have waited longest.
local function place_unplaced(model)
  for _, job in ipairs(R('ZRANGE', P .. 'unplaced:' .. model, 0, 15)) do release(job) end
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
    publish_result(headers.id, cjson.encode(meta), '', ttl, headers.lorry_channel or '')
  end
end

-- Is this caller still the owner? Every write by a worker goes through this fence.
local function owns(job, worker, epoch)
  local h = R('HMGET', job_key(job), 'owner', 'epoch')
  return h[1] == worker and h[2] == epoch
end

-------------------------------------------------------------------------------------------------- sampling requests

local function seat(id, avoid)
  local k = P .. 'request:' .. id
  local model, envelope = unpack(R('HMGET', k, 'model', 'envelope'))
  local worker = pick_worker(P .. 'workers:seats:' .. model, avoid)
  if not worker then
    R('ZADD', P .. 'waiting:' .. model, 'NX', now_ms(), id)
    return false
  end
  R('ZREM', P .. 'waiting:' .. model, id)
  R('ZINCRBY', P .. 'workers:seats:' .. model, -1, worker)
  R('SADD', P .. 'worker:' .. worker .. ':requests', id)
  R('HSET', k, 'owner', worker)
  R('HINCRBY', k, 'tries', 1)
  R('LPUSH', P .. 'queue:' .. worker, envelope)
  return true
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
function F.create(job, model, spec, window, max_ops, max_bytes)
  local k = job_key(job)
  if R('EXISTS', k) == 1 then
    local h = R('HMGET', k, 'model', 'spec')
    return (h[1] == model and h[2] == spec) and 'dup' or 'conflict'
  end
  local t = now_ms()
  R('HSET', k, 'state', 'active', 'model', model, 'spec', spec, 'owner', '', 'epoch', 0, 'committed', -1,
    'released', -1, 'snapshot', -1, 'snapshot_ref', '', 'incomplete', '', 'window', window, 'max_ops', max_ops,
    'max_bytes', max_bytes, 'queued_bytes', 0, 'cost_ms', 0, 'created', whole(t), 'why', '')
  R('ZADD', P .. 'jobs', t, job)
  return 'ok'
end

-- -> ok | dup | conflict | full | closed | failed | nojob.  Safe to repeat.
function F.submit(job, seq, envelope, payload, digest, task, channel, ttl)
  local k = job_key(job)
  local state, committed, max_ops, max_bytes, queued, why =
    unpack(R('HMGET', k, 'state', 'committed', 'max_ops', 'max_bytes', 'queued_bytes', 'why'))
  if not state then return 'nojob' end
  seq, committed = tonumber(seq), tonumber(committed)
  local known = R('HGET', k .. ':digests', seq)
  if known then
    if known ~= digest then return 'conflict' end
    if seq <= committed then republish(task, channel) end
    return 'dup'
  end
  if seq <= committed then return 'conflict' end
  if state == 'closed' then return 'closed' end
  -- The next op is always taken, so that a bound can slow a job down but never wedge it.
  local room = seq - committed <= tonumber(max_ops) and tonumber(queued) + #payload <= tonumber(max_bytes)
  if not room and seq ~= committed + 1 then return 'full' end
  R('HSET', k .. ':ops', seq, envelope)
  R('HSET', k .. ':payloads', seq, payload)
  R('HSET', k .. ':digests', seq, digest)
  R('HINCRBY', k, 'queued_bytes', #payload)
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

-- -> ok | dup | conflict.  An unordered request; safe to repeat.
function F.request(id, model, envelope, payload, digest, channel)
  local k = P .. 'request:' .. id
  local known = R('HGET', k, 'digest')
  if known then return known == digest and 'dup' or 'conflict' end
  if R('EXISTS', META .. id) == 1 then
    republish(id, channel)
    return 'dup'
  end
  R('HSET', k, 'model', model, 'envelope', envelope, 'payload', payload, 'digest', digest, 'owner', '',
    'channel', channel, 'tries', 0)
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
  R('DEL', k)
  publish_result(id, meta, '', ttl, channel)
  return 'cancelled'
end

-- Drop everything of a job but its results and checkpoints.
function F.close(job)
  local k = job_key(job)
  local owner, model = unpack(R('HMGET', k, 'owner', 'model'))
  if not owner then return 'nojob' end
  if owner ~= '' and R('SREM', P .. 'worker:' .. owner .. ':jobs', job) == 1 then
    give_back(P .. 'workers:slots:' .. model, owner)
  end
  R('ZREM', P .. 'unplaced:' .. model, job)
  R('ZREM', P .. 'jobs', job)
  R('DEL', k, k .. ':ops', k .. ':payloads', k .. ':digests', k .. ':cancelled')
  place_unplaced(model)
  return 'ok'
end

---------------------------------------------------------------------------------------------- called by workers

-- Register, or renew the lease. -> ok | dead.  A fenced worker must come back under a new name.
function F.hello(worker, model, slots, seats, lease_ms, info, model_info)
  local t = now_ms()
  if R('ZSCORE', P .. 'workers:dead', worker) then return 'dead' end
  R('ZADD', P .. 'workers:alive', t + tonumber(lease_ms), worker)
  if R('EXISTS', P .. 'worker:' .. worker) == 0 then
    R('HSET', P .. 'worker:' .. worker, 'model', model, 'info', info, 'started', whole(t))
    R('ZADD', P .. 'workers:slots:' .. model, slots, worker)
    R('ZADD', P .. 'workers:seats:' .. model, seats, worker)
    R('HSET', P .. 'models', model, model_info)
  end
  place_unplaced(model)
  seat_waiting(model)
  return 'ok'
end

-- What a worker needs to adopt a job it was handed: the whole record, if it is the owner. -> {} | {field, value, ...}
function F.adopt(job, worker)
  if R('HGET', job_key(job), 'owner') ~= worker then return {} end
  return R('HGETALL', job_key(job))
end

-- -> the request's bytes | false.  Ops of a job that moved on are not handed out again.
function F.take(job, seq, worker)
  local owner, committed = unpack(R('HMGET', job_key(job), 'owner', 'committed'))
  if owner ~= worker or tonumber(seq) <= tonumber(committed) then return false end
  return R('HGET', job_key(job) .. ':payloads', seq)
end

-- -> ok | dup | stale | gap.  incomplete: '-' keep, '' clear, else the seq whose gradients are missing.
-- effect '1': a replay runs the op again, '0': it changed nothing and is skipped, 'drop': it dropped the gradients.
function F.commit(job, seq, worker, epoch, task, meta, output, ttl, channel, incomplete, effect, cost_ms)
  local k = job_key(job)
  if not owns(job, worker, epoch) then return 'stale' end
  seq = tonumber(seq)
  local committed, cost = unpack(R('HMGET', k, 'committed', 'cost_ms'))
  committed = tonumber(committed)
  if seq <= committed then return 'dup' end
  if seq ~= committed + 1 then return 'gap' end
  R('HSET', k, 'committed', seq)
  if incomplete ~= '-' then R('HSET', k, 'incomplete', incomplete) end
  if effect ~= '1' then
    R('HSET', k .. ':ops', seq, effect == 'drop' and '!' or '-')
    drop_payload(job, seq)
  end
  -- An exponential mean of what an op costs, for the ETA a waiting client is told.
  cost = tonumber(cost)
  R('HSET', k, 'cost_ms', cost == 0 and cost_ms or whole(cost * 0.8 + tonumber(cost_ms) * 0.2))
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
  R('DEL', k)
  if R('SREM', P .. 'worker:' .. worker .. ':requests', id) == 1 then
    give_back(P .. 'workers:seats:' .. model, worker)
  end
  publish_result(id, meta, output, ttl, channel)
  seat_waiting(model)
  return 'ok'
end

function F.take_request(id, worker)
  local k = P .. 'request:' .. id
  if R('HGET', k, 'owner') ~= worker then return false end
  return R('HGET', k, 'payload')
end

-- Move the snapshot pointer and free the journal that it covers. -> ok | stale | gap
function F.snapshot(job, worker, epoch, seq, ref)
  local k = job_key(job)
  if not owns(job, worker, epoch) then return 'stale' end
  local committed, last = unpack(R('HMGET', k, 'committed', 'snapshot'))
  seq = tonumber(seq)
  if seq > tonumber(committed) or seq < tonumber(last) then return 'gap' end
  R('HSET', k, 'snapshot', seq, 'snapshot_ref', ref)
  for s = tonumber(last) + 1, seq do
    R('HDEL', k .. ':ops', s)
    drop_payload(job, s)
  end
  return 'ok'
end

-- Deliver again what is released and uncommitted: repairs lost Celery messages. -> stale | idle | number delivered
function F.resend(job, worker, epoch)
  local k = job_key(job)
  if not owns(job, worker, epoch) then return 'stale' end
  local committed, released = unpack(R('HMGET', k, 'committed', 'released'))
  if tonumber(released) <= tonumber(committed) then return 'idle' end
  R('HSET', k, 'released', committed)
  return tostring(release(job))
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
  leave(job, worker)
  place_unplaced(R('HGET', job_key(job), 'model'))  -- those that wait come before the one that leaves
  release(job, worker)
  return 'ok'
end

-- Nothing can bring this job's state back: fail what is queued and all that comes; it needs no worker any more.
-- -> ok | stale
function F.fail(job, worker, epoch, template, ttl)
  if not owns(job, worker, epoch) then return 'stale' end
  R('HSET', job_key(job), 'state', 'failed', 'why', template)
  drain_failed(job, template, ttl)
  leave(job, worker)
  place_unplaced(R('HGET', job_key(job), 'model'))
  return 'ok'
end

-- Take a worker out of service: no new jobs or requests, those it holds go elsewhere. Used for the dead and the leaving.
local function retire(worker, limit)
  local model = R('HGET', P .. 'worker:' .. worker, 'model')
  local moved = 0
  if model then
    R('ZREM', P .. 'workers:slots:' .. model, worker)
    R('ZREM', P .. 'workers:seats:' .. model, worker)
  end
  for _, job in ipairs(R('SPOP', P .. 'worker:' .. worker .. ':jobs', limit)) do
    if R('HGET', job_key(job), 'owner') == worker then
      disown(job)
      release(job)
      moved = moved + 1
    end
  end
  for _, id in ipairs(R('SPOP', P .. 'worker:' .. worker .. ':requests', limit)) do
    if R('HGET', P .. 'request:' .. id, 'owner') == worker then
      R('HSET', P .. 'request:' .. id, 'owner', '')
      seat(id)
      moved = moved + 1
    end
  end
  if R('SCARD', P .. 'worker:' .. worker .. ':jobs') + R('SCARD', P .. 'worker:' .. worker .. ':requests') == 0 then
    R('ZREM', P .. 'workers:alive', worker)
    R('DEL', P .. 'queue:' .. worker, P .. 'worker:' .. worker)
  end
  return moved
end

-- Anyone may call this: moves the jobs and requests of workers whose lease ran out. -> number moved
function F.reap(limit)
  local t, moved = now_ms(), 0
  for _, worker in ipairs(R('ZRANGEBYSCORE', P .. 'workers:alive', '-inf', t, 'LIMIT', 0, 4)) do
    R('ZADD', P .. 'workers:dead', t, worker)
    moved = moved + retire(worker, limit)
  end
  R('ZREMRANGEBYSCORE', P .. 'workers:dead', '-inf', t - 86400000)
  return moved
end

-- A worker stops taking new jobs and requests (it still commits what it holds).
function F.close_doors(worker)
  local model = R('HGET', P .. 'worker:' .. worker, 'model')
  if not model then return 'gone' end
  R('ZREM', P .. 'workers:slots:' .. model, worker)
  R('ZREM', P .. 'workers:seats:' .. model, worker)
  return 'ok'
end

-- A worker leaves for good; whatever it still holds goes elsewhere. -> number moved
function F.goodbye(worker, limit)
  R('ZADD', P .. 'workers:dead', now_ms(), worker)
  return retire(worker, limit)
end

return F[ARGV[1]](unpack(ARGV, 2))
