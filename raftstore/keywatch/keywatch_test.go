package keywatch_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/keywatch"
	"keelson.dev/keelson/raftstore/storetest"
)

// commit applies ops to the store.
func commit(t *testing.T, store raftstore.Store, ops ...raftstore.Op) {
	t.Helper()
	if _, err := store.Commit(t.Context(), raftstore.Commit{Ops: ops}); err != nil {
		t.Fatal(err)
	}
}

// Every value of the key is applied in order, and no other key.
func TestRunAppliesEachValue(t *testing.T) {
	for _, exists := range []bool{true, false} {
		store := storetest.NewMemory()
		t.Cleanup(store.Close)
		want := []string{"two", "three", "last"}
		if exists {
			commit(t, store, raftstore.Put("/key", []byte("one")), raftstore.Put("/key/below", []byte("other")))
			want = append([]string{"one"}, want...)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var got []string
		synced := 0
		err := keywatch.Run(ctx, store, "/key", func(value []byte) error {
			if got = append(got, string(value)); string(value) == "last" {
				cancel()
			}
			return nil
		}, func() {
			synced++
			commit(t, store, raftstore.Put("/key", []byte("two")), raftstore.Put("/key2", []byte("other")))
			commit(t, store, raftstore.Delete("/key"))
			commit(t, store, raftstore.Put("/key", []byte("three")))
			commit(t, store, raftstore.Put("/key", []byte("last")))
		})
		if err != nil || synced != 1 || !slices.Equal(got, want) {
			t.Errorf("the key exists: %v: %v, synced %d times, got %q, want %q", exists, err, synced, got, want)
		}
	}
}

// An error of apply ends the call, before and after the first value.
func TestRunReturnsErrors(t *testing.T) {
	refused := errors.New("refused")
	refuse := func([]byte) error { return refused }
	store := storetest.NewMemory()
	synced := 0
	count := func() { synced++ }
	commit(t, store, raftstore.Put("/key", []byte("one")))
	if err := keywatch.Run(t.Context(), store, "/key", refuse, count); !errors.Is(err, refused) || synced != 0 {
		t.Errorf("the first value: %v, synced %d times", err, synced)
	}
	put := func() { commit(t, store, raftstore.Put("/later", []byte("one"))) }
	if err := keywatch.Run(t.Context(), store, "/later", refuse, put); !errors.Is(err, refused) {
		t.Errorf("a later value: %v", err)
	}
	if err := keywatch.Run(t.Context(), store, "/key", func([]byte) error {
		return nil
	}, store.Close); !errors.Is(err, raftstore.ErrClosed) {
		t.Errorf("a store that is closed meanwhile: %v", err)
	}
	if err := keywatch.Run(t.Context(), store, "/key", refuse, count); !errors.Is(err, raftstore.ErrClosed) ||
		synced != 0 {
		t.Errorf("a closed store: %v, synced %d times", err, synced)
	}
}
