// Package hclogger adapts slog to the logger interface of hashicorp/raft.
package hclogger

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"slices"
	"strings"

	"github.com/hashicorp/go-hclog"
)

// logger is an hclog.Logger that writes to slog. hashicorp/raft logs through it.
type logger struct {
	out  *slog.Logger
	name string
	args []any
}

// New returns an hclog.Logger that writes to out.
func New(out *slog.Logger) hclog.Logger { return &logger{out: out} }

// expected lists messages that raft logs as warnings or errors although they occur in normal
// operation. For example, a commit notice may arrive before its entry, and a peer may be down. They
// are logged at debug level.
var expected = []string{
	"failed to get previous log",
	"failed to heartbeat to",
	"failed to appendEntries to",
	"failed to make requestVote RPC",
	"failed to decode incoming command",
	"failed to flush response",
	"failed to get log", // a snapshot will be sent instead
	"appendEntries rejected, sending older logs",
	"rejecting pre-vote request since we have a leader", // see failover.Watch
}

func (l *logger) Log(level hclog.Level, msg string, args ...any) {
	to := slog.LevelDebug
	switch level {
	case hclog.Warn:
		to = slog.LevelWarn
	case hclog.Error:
		to = slog.LevelError
	case hclog.Info:
		to = slog.LevelInfo
	}
	for _, e := range expected {
		if strings.HasPrefix(msg, e) {
			to = slog.LevelDebug
		}
	}
	if l.out.Enabled(context.Background(), to) {
		l.out.Log(context.Background(), to, msg, formatArgs(args)...)
	}
}

// formatArgs returns a copy of args in which each hclog.Format is replaced by its formatted text.
func formatArgs(args []any) []any {
	out := slices.Clone(args)
	for i, a := range out {
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			out[i] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
	}
	return out
}

func (l *logger) Trace(msg string, args ...any) { l.Log(hclog.Trace, msg, args...) }
func (l *logger) Debug(msg string, args ...any) { l.Log(hclog.Debug, msg, args...) }
func (l *logger) Info(msg string, args ...any)  { l.Log(hclog.Info, msg, args...) }
func (l *logger) Warn(msg string, args ...any)  { l.Log(hclog.Warn, msg, args...) }
func (l *logger) Error(msg string, args ...any) { l.Log(hclog.Error, msg, args...) }

func (l *logger) isEnabled(level slog.Level) bool {
	return l.out.Enabled(context.Background(), level)
}

func (l *logger) IsTrace() bool                    { return false }
func (l *logger) IsDebug() bool                    { return l.isEnabled(slog.LevelDebug) }
func (l *logger) IsInfo() bool                     { return l.isEnabled(slog.LevelInfo) }
func (l *logger) IsWarn() bool                     { return l.isEnabled(slog.LevelWarn) }
func (l *logger) IsError() bool                    { return l.isEnabled(slog.LevelError) }
func (l *logger) ImpliedArgs() []any               { return l.args }
func (l *logger) Name() string                     { return l.name }
func (l *logger) SetLevel(hclog.Level)             {}
func (l *logger) GetLevel() hclog.Level            { return hclog.Debug }
func (l *logger) ResetNamed(n string) hclog.Logger { return &logger{out: l.out, name: n, args: l.args} }
func (l *logger) Named(n string) hclog.Logger      { return l.ResetNamed(n) }

func (l *logger) With(args ...any) hclog.Logger {
	return &logger{out: l.out.With(args...), name: l.name, args: append(l.args[:len(l.args):len(l.args)], args...)}
}

func (l *logger) StandardLogger(*hclog.StandardLoggerOptions) *log.Logger {
	return slog.NewLogLogger(l.out.Handler(), slog.LevelInfo)
}

func (l *logger) StandardWriter(o *hclog.StandardLoggerOptions) io.Writer {
	return l.StandardLogger(o).Writer()
}
