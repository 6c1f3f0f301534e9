"""What clients, workers and gateways of Lorry agree on: types, wire format, mailbox, results, errors."""
