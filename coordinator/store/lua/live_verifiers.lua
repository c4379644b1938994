-- Return the verifiers of a target whose lease has not ended.
-- KEYS: 1 fleet ZSET, 2 identities HASH
-- Returns a line for each, in one text: its id, a space, and its identity.
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('ZREM', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
end
local lines, known = {}, redis.call('HGETALL', KEYS[2])
for i = 1, #known, 2 do
  lines[#lines + 1] = known[i] .. ' ' .. known[i + 1]
end
return table.concat(lines, '\n')
