// Package logtail keeps the most recent lines of a log, so that they can be reported with an error.
package logtail

import (
	"bytes"
	"sync"
)

// Lines is an io.Writer that keeps the newest whole lines that were written to it, up to a number
// of bytes. Writes never fail. The zero value keeps nothing. It is safe for concurrent use.
type Lines struct {
	maxBytes int

	mu   sync.Mutex
	kept []byte
}

// New returns a Lines that keeps at most maxBytes bytes.
func New(maxBytes int) *Lines { return &Lines{maxBytes: maxBytes} }

// Write implements io.Writer. It never fails.
func (l *Lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = append(l.kept, p...)
	if len(l.kept) > l.maxBytes+l.maxBytes/2 || cap(l.kept) > 2*l.maxBytes+len(p) {
		l.kept = bytes.Clone(lastLines(l.kept, l.maxBytes))
	}
	return len(p), nil
}

// Bytes returns the newest whole lines, oldest first. It returns nil if l is nil.
func (l *Lines) Bytes() []byte {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(lastLines(l.kept, l.maxBytes))
}

// lastLines returns the whole lines at the end of the text that together have at most maxBytes
// bytes.
func lastLines(text []byte, maxBytes int) []byte {
	if len(text) <= maxBytes {
		return text
	}
	cut := len(text) - maxBytes
	if text[cut-1] == '\n' {
		return text[cut:]
	}
	next := bytes.IndexByte(text[cut:], '\n')
	if next < 0 {
		return nil
	}
	return text[cut+next+1:]
}
