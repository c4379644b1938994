-- Read limits and use of tenants.
-- KEYS: 1 tenant-limits HASH, then tenant-use:<tenant> HASH and tenant-places:<tenant> ZSET, a pair for each tenant
-- ARGV: 1 opens and 2 tokens per minute where the operator has set nothing else (0 no limit), then the tenants
-- Returns for each tenant: its own limits ('' none), opens and tokens that count, as text, and places.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

-- Return the part of an amount that still counts after some minutes: with a limit, the limit is taken off in a minute.
local function remaining(amount, minutes, limit)
  amount = tonumber(amount or '0')
  return limit > 0 and math.max(0, amount - minutes * limit) or amount * math.exp(-minutes)
end

local answer = {}
for i = 3, #ARGV do
  local own = redis.call('HGET', KEYS[1], ARGV[i]) or ''
  local opens, tokens = string.match(own, '^%S+ (%S+) (%S+)')
  local use, places = KEYS[2 * i - 4], KEYS[2 * i - 3]
  local known = redis.call('HMGET', use, 'opens', 'tokens', 'at')
  local minutes = math.max(0, now - tonumber(known[3] or now)) / 60000
  answer[#answer + 1] = own
  answer[#answer + 1] = string.format('%.3f', remaining(known[1], minutes, tonumber(opens) or tonumber(ARGV[1])))
  answer[#answer + 1] = string.format('%.3f', remaining(known[2], minutes, tonumber(tokens) or tonumber(ARGV[2])))
  answer[#answer + 1] = redis.call('ZCOUNT', places, string.format('%.0f', now), '+inf')
end
return answer
