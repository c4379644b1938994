-- Forget a session that is over and free its place.
-- KEYS: 1 session:<id> HASH, 2 telemetry:<id> HASH, 3 closed:<id> STRING, then placements:<verifier> ZSET of each
--       verifier that may hold a place for it. Beside these: tenant-places:<tenant> ZSET of its tenant
-- ARGV: 1 session id, 2 ms for which one of its tickets may be valid, 3 beginning of the key tenant-places
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if tenant then
  redis.call('ZREM', ARGV[3] .. tenant, ARGV[1])
end
for i = 4, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[1])
end
if redis.call('GET', KEYS[3]) ~= 'killed' then
  redis.call('SET', KEYS[3], '1', 'PX', ARGV[2])
end
return redis.call('DEL', KEYS[1], KEYS[2])
