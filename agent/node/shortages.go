package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/internal/durable"
)

// shortages keeps when the node was short of something last: what its conditions hold outlives the agent. The file is in the run
// folder, where there is room while the disk is full. The zero value keeps nothing.
type shortages struct {
	file, boot string
	clock      func() time.Duration // since the machine was started
	failed     error                // that was met last, and told if told is set
	told       bool
}

// lastShort is what the file holds, by the names of signals. Times are those since the machine was started, so that they are good for
// one boot, whatever is done to its clock. Fields are added under new names and never change their meaning.
type lastShort struct {
	Version int                      `json:"version"`
	Boot    string                   `json:"boot"`
	Short   map[string]time.Duration `json:"short"`
}

const (
	shortVersion = 1
	shortLimit   = 64 << 10 // bytes of the file that are read
)

func newShortages(runDir, boot string) shortages {
	return shortages{file: filepath.Join(runDir, "short.json"), boot: boot, clock: session.SinceBoot}
}

// load adds what the agent before this one has seen.
func (s *shortages) load(to eviction.State, now time.Time) eviction.State {
	if s.file == "" {
		return to
	}
	l, err := s.read()
	if s.failed = err; err != nil || l.Boot != s.boot {
		return to
	}
	at := s.clock()
	for i := range eviction.Signals {
		if was, ok := l.Short[i.String()]; ok && was >= 0 && was <= at {
			to = to.WasShort(i, now.Add(was-at))
		}
	}
	return to
}

func (s *shortages) read() (l lastShort, err error) {
	f, err := os.Open(s.file)
	if errors.Is(err, fs.ErrNotExist) {
		return l, nil // it was short of nothing
	}
	var raw []byte
	if err == nil {
		defer f.Close()
		raw, err = io.ReadAll(io.LimitReader(f, shortLimit+1))
	}
	if err == nil && len(raw) > shortLimit {
		err = fmt.Errorf("%s has more than %d bytes", s.file, shortLimit)
	}
	if err == nil {
		err = json.Unmarshal(raw, &l)
	}
	if err != nil {
		return lastShort{}, fmt.Errorf("reading what the node was short of last: %w; the file may be removed", err)
	}
	return l, nil
}

// save writes down what a look has found, where that is a shortage. What fails is told once, until it works.
func (s *shortages) save(state eviction.State, r eviction.Reading, log *slog.Logger) {
	if s.file == "" {
		return
	}
	short := false
	l := lastShort{Version: shortVersion, Boot: s.boot, Short: map[string]time.Duration{}}
	for i := range eviction.Signals {
		short = short || r.Levels[i].Short()
		if at := state.Short(i); !at.IsZero() {
			l.Short[i.String()] = s.clock() - r.At.Sub(at)
		}
	}
	if short {
		b, err := json.Marshal(l)
		if err == nil {
			err = durable.Write(s.file, b)
		}
		if s.failed = err; err == nil {
			s.told = false
		}
	}
	if s.failed != nil && !s.told {
		s.told = true
		log.Warn("how long the node is under pressure is not known over a restart of the agent", "file", s.file, "err", s.failed)
	}
}
