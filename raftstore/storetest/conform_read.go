package storetest

import (
	"errors"
	"fmt"
	"testing"

	"keelson.dev/keelson/raftstore"
)

var readParts = []part{
	{"Listing", checkListing},
	{"Paging", checkPaging},
	{"Past", checkPastReads},
	{"LocalReads", localReads},
}

func checkListing(t *testing.T, s Subject) {
	c := newCaller(t, s)
	for _, k := range []string{"/p/a", "/p/b", "/p/c", "/p/d", "/pq", "/o", "/p"} {
		c.mustCommit(raftstore.Put(k, []byte(k)))
	}
	l := c.mustList("/p/", raftstore.ListOptions{})
	if joinedKeys(l) != "/p/a /p/b /p/c /p/d" || l.More || l.Remaining != 0 || l.Revision != 7 {
		t.Errorf("list: %q %+v", joinedKeys(l), l)
	}
	if l := c.mustList("", raftstore.ListOptions{}); len(l.Items) != 7 {
		t.Errorf("list of everything: %q", joinedKeys(l))
	}
	if l := c.mustList("/none/", raftstore.ListOptions{Limit: 3}); len(l.Items) != 0 || l.More {
		t.Errorf("list of nothing: %+v", l)
	}
	page := c.mustList("/p/", raftstore.ListOptions{Limit: 3})
	if joinedKeys(page) != "/p/a /p/b /p/c" || !page.More || page.Remaining != 1 {
		t.Errorf("first page: %q %+v", joinedKeys(page), page)
	}
	// Changes between two pages are not visible in the second.
	c.mustCommit(raftstore.Delete("/p/d"))
	c.mustCommit(raftstore.Put("/p/cc", nil))
	rest := c.mustList("/p/", raftstore.ListOptions{Limit: 3, After: "/p/c", At: page.Revision})
	if joinedKeys(rest) != "/p/d" || rest.More || rest.Revision != page.Revision {
		t.Errorf("second page: %q %+v", joinedKeys(rest), rest)
	}
	if l := c.mustList("/p/", raftstore.ListOptions{After: "/p/b"}); joinedKeys(l) != "/p/c /p/cc" {
		t.Errorf("list after a key: %q", joinedKeys(l))
	}
	if l := c.mustList("/p/", raftstore.ListOptions{After: "/z"}); len(l.Items) != 0 {
		t.Errorf("list after the end: %q", joinedKeys(l))
	}
}

func checkPastReads(t *testing.T, s Subject) {
	c := newCaller(t, s)
	var states []string
	for i := range 700 {
		k := fmt.Sprintf("/k/%d", i*7%31)
		if i%5 == 4 {
			c.mustCommit(raftstore.Put(k, nil))
			c.mustCommit(raftstore.Delete(k))
		} else {
			c.mustCommit(raftstore.Put(k, []byte(fmt.Sprint(i))))
		}
		if i%50 == 0 {
			l := c.mustList("/k/", raftstore.ListOptions{})
			states = append(states, fmt.Sprintf("%d %v", l.Revision, l.Items))
		}
	}
	for _, want := range states {
		var at raftstore.Revision
		fmt.Sscan(want, &at)
		l := c.mustList("/k/", raftstore.ListOptions{At: at})
		if got := fmt.Sprintf("%d %v", l.Revision, l.Items); got != want {
			t.Fatalf("state at %d:\n got %s\nwant %s", at, got, want)
		}
	}
	_, err := s.Store.List(c.ctx, "/", raftstore.ListOptions{At: s.Store.Applied() + 100})
	if !errors.Is(err, raftstore.ErrFutureRevision) {
		t.Errorf("list in the future: %v", err)
	}
}

// checkPaging checks that the pages of one revision form one complete list, even if commits are
// made between them, until the revision is compacted.
func checkPaging(t *testing.T, s Subject) {
	c := newCaller(t, s)
	for i := range 40 {
		c.mustCommit(raftstore.Put(fmt.Sprintf("/p/%02d", i), []byte(fmt.Sprint(i))),
			raftstore.Put(fmt.Sprintf("/q/%02d", i), nil))
	}
	whole := c.mustList("/p/", raftstore.ListOptions{})
	page := c.mustList("/p/", raftstore.ListOptions{Limit: 7})
	got := append([]raftstore.Item(nil), page.Items...)
	for n := 0; page.More; n++ {
		if page.Remaining != int64(40-len(got)) {
			t.Errorf("%d remain after %d of 40", page.Remaining, len(got))
		}
		c.mustCommit(raftstore.Delete(fmt.Sprintf("/p/%02d", 39-n)),
			raftstore.Put(fmt.Sprintf("/p/%02d", 38-n), []byte("new")),
			raftstore.Put(fmt.Sprintf("/p/%02d.", n*7+9), nil))
		page = c.mustList("/p/", raftstore.ListOptions{Limit: 7, After: got[len(got)-1].Key, At: whole.Revision})
		if page.Revision != whole.Revision {
			t.Fatalf("page %d shows revision %d of %d", n, page.Revision, whole.Revision)
		}
		got = append(got, page.Items...)
	}
	if fmt.Sprint(got) != fmt.Sprint(whole.Items) {
		t.Errorf("pages together:\n%v\nwant\n%v", got, whole.Items)
	}
	// The last page may be exactly full.
	if l := c.mustList("/q/", raftstore.ListOptions{Limit: 20, After: "/q/19"}); len(l.Items) != 20 || l.More ||
		l.Remaining != 0 {
		t.Errorf("full last page: %d items, more=%v, %d remain", len(l.Items), l.More, l.Remaining)
	}
	s.Compact(whole.Revision + 1)
	if _, err := s.Store.List(c.ctx, "/p/", raftstore.ListOptions{Limit: 7, After: "/p/06",
		At: whole.Revision}); !errors.Is(err, raftstore.ErrCompacted) {
		t.Errorf("page of a compacted revision: %v", err)
	}
}

// localReads checks that a local read returns every change that was committed through the same
// store before.
func localReads(t *testing.T, s Subject) {
	c := newCaller(t, s)
	local := raftstore.ReadOptions{Local: true}
	for i := range 50 {
		rev := c.mustCommit(raftstore.Put("/l", []byte(fmt.Sprint(i))))
		it, at, err := s.Store.Get(c.ctx, "/l", local)
		if err != nil || string(it.Value) != fmt.Sprint(i) || at < rev {
			t.Fatalf("local get after commit %d at revision %d: %q at %d, error %v", i, rev, it.Value, at, err)
		}
		if l := c.mustList("/l", raftstore.ListOptions{ReadOptions: local}); l.Revision < rev || len(l.Items) != 1 {
			t.Fatalf("local list after revision %d: %+v", rev, l)
		}
		if now := s.Store.Applied(); now < rev {
			t.Fatalf("applied is %d after a commit at %d", now, rev)
		}
	}
	if _, rev, err := s.Store.Get(c.ctx, "/none", local); !errors.Is(err, raftstore.ErrNotFound) || rev == 0 {
		t.Errorf("local get of an absent key: revision %d, error %v", rev, err)
	}
	if _, err := s.Store.List(c.ctx, "/", raftstore.ListOptions{ReadOptions: local,
		At: s.Store.Applied() + 100}); !errors.Is(err, raftstore.ErrFutureRevision) {
		t.Errorf("local list in the future: %v", err)
	}
}
