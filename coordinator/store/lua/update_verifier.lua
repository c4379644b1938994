-- Cordon, uncordon or drain a verifier by an operator's order. A cordon holds for the verifier's id, whatever registers
-- under it; a drain is for the instance that is registered now.
-- KEYS: 1 verifier:<id> HASH, 2 cordon:<id> STRING
-- ARGV: 1 cordon, uncordon or drain, 2 ms to keep the cordon after the last report
-- Returns 1, or 0 if the verifier is not registered and has no cordon to be lifted.
local instance = redis.call('HGET', KEYS[1], 'instance')
if ARGV[1] == 'uncordon' then
  return math.max(redis.call('DEL', KEYS[2]), instance and 1 or 0)
end
if not instance then
  return 0
end
if ARGV[1] == 'drain' then
  redis.call('SET', KEYS[2], instance)
else
  redis.call('SET', KEYS[2], '', 'NX') -- a drain stands
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
