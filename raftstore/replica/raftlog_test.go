package replica_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
)

// raftLines counts the lines about something that the replicas of a group log, for each replica.
type raftLines struct {
	about string

	mu sync.Mutex
	of map[string]int
}

func (l *raftLines) count(of string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.of[of]
}

// raftHandler is the log of one replica.
type raftHandler struct {
	of   string
	into *raftLines
}

func (h raftHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h raftHandler) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h raftHandler) WithGroup(string) slog.Handler            { return h }
func (h raftHandler) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, h.into.about) {
		h.into.mu.Lock()
		defer h.into.mu.Unlock()
		if h.into.of == nil {
			h.into.of = map[string]int{}
		}
		h.into.of[h.of]++
	}
	return nil
}
