package storetest_test

import (
	"context"
	"errors"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

const quota = 24 << 20

func TestMemoryConforms(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Subject {
		m := storetest.NewMemory()
		t.Cleanup(m.Close)
		m.SetQuota(quota)
		return storetest.Subject{Store: m, Compact: m.Compact, Quota: quota}
	})
}

func TestMemoryFences(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	put := []raftstore.Op{raftstore.Put("/a", nil)}
	fences := make(chan raftstore.Fence)
	ended := make(chan error)
	go func() {
		ended <- m.Lead(ctx, func(ctx context.Context, f raftstore.Fence) error {
			fences <- f
			<-ctx.Done()
			return nil
		})
	}()
	first := <-fences
	if _, err := m.Commit(ctx, raftstore.Commit{Ops: put, Fence: first}); err != nil {
		t.Errorf("commit of the leader: %v", err)
	}
	m.Depose()
	second := <-fences
	if _, err := m.Commit(ctx, raftstore.Commit{Ops: put, Fence: first}); !errors.Is(err, raftstore.ErrFenced) {
		t.Errorf("commit of the deposed leader: %v", err)
	}
	if _, err := m.Commit(ctx, raftstore.Commit{Ops: put, Fence: second}); err != nil {
		t.Errorf("commit of the new leader: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("lead: %v", err)
	}
}
