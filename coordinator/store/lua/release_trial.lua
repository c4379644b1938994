-- Read the releases of a verifier's target, where a trial may be running.
-- KEYS: 1 releases HASH, 2 release-serial STRING, 3 verifier:<id> HASH
-- ARGV: 1 serial that the caller knows, 2 weights hash of the target whose releases it knows at that serial
-- Returns {serial ('0' if there are no releases), weights hash, JSON of its releases: '' if there are none or the
--       caller knows them}.
local serial = redis.call('GET', KEYS[2])
if not serial then
  return {'0', '', ''}
end
local weights = redis.call('HGET', KEYS[3], 'weights_hash') or ''
if serial == ARGV[1] and weights == ARGV[2] then
  return {serial, weights, ''}
end
return {serial, weights, redis.call('HGET', KEYS[1], weights) or ''}
