-- Bring what a tenant has opened and generated up to date, and count what it opens or has generated now.
-- KEYS: 1 tenant-use:<tenant> HASH
-- ARGV: 1 opens and 2 tokens per minute (0 no limit), 3 ms to keep what it uses, 4 whether it opens a session (0/1), which
--       is not counted if a limit is reached, 5 tokens generated
-- Returns {opens and tokens that count, as text, limit that is reached ('', tokens or opens), ms after which to open again,
--       time at which its tokens are used up no longer (ms, 0: they are not)}.
local MOST_MINUTES = 61 -- of its limit that a tenant's tokens count at most: it is never kept out for over an hour
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local most_opens, most_tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local known = redis.call('HMGET', KEYS[1], 'opens', 'tokens', 'at')
local minutes = math.max(0, now - tonumber(known[3] or now)) / 60000

-- Return the part of an amount that still counts after some minutes: with a limit, the limit is taken off in a minute.
local function remaining(amount, limit)
  amount = math.max(0, tonumber(amount or '0'))
  return limit > 0 and math.max(0, amount - minutes * limit) or amount * math.exp(-minutes)
end

local opens, tokens = remaining(known[1], most_opens), remaining(known[2], most_tokens) + tonumber(ARGV[5])
if most_tokens > 0 then tokens = math.min(tokens, MOST_MINUTES * most_tokens) end

local which, after, used_up = '', 0, '0'
if most_tokens > 0 and tokens >= most_tokens then
  which, after = 'tokens', (tokens - most_tokens + 1) * 60000 / most_tokens
  used_up = string.format('%.0f', now + after)
elseif most_opens > 0 and opens + 1 > most_opens then
  which, after = 'opens', (opens + 1 - most_opens) * 60000 / most_opens
end
if ARGV[4] == '1' and which == '' then opens = opens + 1 end
if ARGV[4] == '1' or ARGV[5] ~= '0' then
  redis.call('HSET', KEYS[1], 'opens', opens, 'tokens', tokens, 'at', string.format('%.0f', now))
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return {string.format('%.3f', opens), string.format('%.3f', tokens), which, math.ceil(after), used_up}
