package ttlcache

import (
	"testing"
	"time"
)

// What is put is found until its time has passed, and what is put again counts once.
func TestEntriesEnd(t *testing.T) {
	c := New[string, int](1 << 20)
	at := time.Unix(1000, 0)
	c.Put("a", 1, 10, at.Add(time.Minute))
	c.Put("a", 2, 10, at.Add(time.Minute))
	if v, ok := c.Get("a", at); !ok || v != 2 || c.Len() != 1 {
		t.Errorf("got %d, %t among %d", v, ok, c.Len())
	}
	if _, ok := c.Get("a", at.Add(time.Minute)); ok {
		t.Error("an entry is good at its end")
	}
	if c.Len() != 0 || c.used != 0 {
		t.Errorf("%d entries of %d bytes are left", c.Len(), c.used)
	}
}

// However much is put, the bytes stay within the bound, and what is asked for stays longest.
func TestBytesAreBounded(t *testing.T) {
	const maxBytes = 100 << 10
	c := New[int, int](maxBytes)
	at := time.Unix(1000, 0)
	c.Put(-1, 0, 100, at.Add(time.Hour))
	for i := range 10_000 {
		c.Put(i, i, 100, at.Add(time.Hour))
		if _, ok := c.Get(-1, at); !ok {
			t.Fatalf("what is asked for all the time went after %d others", i)
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
		t.Error("an entry of half the cache was remembered")
	}
	c.Clear()
	if c.Len() != 0 || c.used != 0 {
		t.Error("something is left")
	}
}
