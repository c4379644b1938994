-- List all tenants that operators have created.
-- KEYS: 1 tenants HASH
-- Returns name, record, ...
return redis.call('HGETALL', KEYS[1])
