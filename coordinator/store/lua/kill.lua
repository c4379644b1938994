-- End a session for good by an operator's order: no report and no ticket gives it a place again.
-- KEYS: 1 session:<id> HASH, 2 telemetry:<id> HASH, 3 closed:<id> STRING, then placements:<verifier> ZSET of each
--       verifier that may hold a place for it. Beside these: tenant-places:<tenant> ZSET of its tenant
-- ARGV: 1 session id, 2 ms for which one of its tickets proves ownership, 3 beginning of the key tenant-places
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if tenant then
  redis.call('ZREM', ARGV[3] .. tenant, ARGV[1])
end
for i = 4, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[1])
end
redis.call('SET', KEYS[3], 'killed', 'PX', ARGV[2])
return redis.call('DEL', KEYS[1], KEYS[2])
