-- Read the releases of a target, where trials may be running: its drafts, and tenants' stores for it.
-- KEYS: 1 releases HASH, 2 release-serial STRING
-- ARGV: 1 serial at which the caller knows them, 2 weights hash of the target ('' none)
-- Returns {serial ('0' if there are no releases), then key and JSON of each track: none if there are none or the caller
--       knows them}.
local serial = redis.call('GET', KEYS[2])
if not serial then
  return {'0'}
end
local weights, answer = ARGV[2], {serial}
if weights == '' or serial == ARGV[1] then
  return answer
end
for _, key in ipairs(redis.call('HKEYS', KEYS[1])) do
  if key == weights or string.sub(key, 1, #weights + 1) == weights .. '\n' then
    answer[#answer + 1] = key
    answer[#answer + 1] = redis.call('HGET', KEYS[1], key)
  end
end
return answer
