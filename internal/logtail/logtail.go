// Package logtail keeps the last of what was written, such as a daemon's log, for who asks what happened just before.
package logtail

import (
	"bytes"
	"sync"
)

// Lines keeps whole lines, the newest, within so many bytes. The zero value keeps nothing. It is an io.Writer that never
// fails, safe for concurrent use.
type Lines struct {
	maxBytes int

	mu   sync.Mutex
	kept []byte
}

// New keeps so many bytes at most.
func New(maxBytes int) *Lines { return &Lines{maxBytes: maxBytes} }

// Write implements io.Writer.
func (l *Lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = append(l.kept, p...)
	if len(l.kept) > l.maxBytes+l.maxBytes/2 || cap(l.kept) > 2*l.maxBytes+len(p) {
		l.kept = bytes.Clone(lastLines(l.kept, l.maxBytes))
	}
	return len(p), nil
}

// Bytes are the lines that are kept, the oldest first.
func (l *Lines) Bytes() []byte {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(lastLines(l.kept, l.maxBytes))
}

// lastLines is the end of a text from the beginning of a line on, of so many bytes at most.
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
