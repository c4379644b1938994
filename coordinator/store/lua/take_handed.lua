-- Take the reports that were handed to a coordinator.
-- KEYS: 1 handed:<coordinator> HASH
-- Returns verifier id and report of each.
local found = redis.call('HGETALL', KEYS[1])
redis.call('DEL', KEYS[1])
return found
