package ttlcache

import (
	"testing"
	"time"
)

// A value is returned until it expires. A value that is put again counts once.
func TestEntriesEnd(t *testing.T) {
	c := New[string, int](1 << 20)
	at := time.Unix(1000, 0)
	c.Put("a", 1, 10, at.Add(time.Minute))
	c.Put("a", 2, 10, at.Add(time.Minute))
	if v, ok := c.Get("a", at); !ok || v != 2 || c.Len() != 1 {
		t.Errorf("got %d, %t among %d", v, ok, c.Len())
	}
	if _, ok := c.Get("a", at.Add(time.Minute)); ok {
		t.Error("an entry is valid at its expiry")
	}
	if c.Len() != 0 || c.used != 0 {
		t.Errorf("%d entries of %d bytes remain", c.Len(), c.used)
	}
}

// The total size stays within the limit, and an entry that is in use stays longest.
func TestBytesAreBounded(t *testing.T) {
	const maxBytes = 100 << 10
	c := New[int, int](maxBytes)
	at := time.Unix(1000, 0)
	c.Put(-1, 0, 100, at.Add(time.Hour))
	for i := range 10_000 {
		c.Put(i, i, 100, at.Add(time.Hour))
		if _, ok := c.Get(-1, at); !ok {
			t.Fatalf("an entry that is in use was dropped after %d others", i)
		}
		if c.used > maxBytes {
			t.Fatalf("%d bytes after %d entries", c.used, i)
		}
	}
	if n := c.Len(); n < 100 || n > maxBytes/entryOverhead {
		t.Errorf("%d entries", n)
	}
	before := c.Len()
	if c.Put(-2, 0, maxBytes/2, at.Add(time.Hour)); c.Len() != before {
		t.Error("an entry of half the cache was cached")
	}
	c.Clear()
	if c.Len() != 0 || c.used != 0 {
		t.Error("entries remain after Clear")
	}
}
