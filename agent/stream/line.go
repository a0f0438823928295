package stream

import (
	"bytes"
	"time"
)

// logLine is one line of a log in CRI format: "TIME STREAM TAGS TEXT".
type logLine struct {
	stamp   []byte // as written: RFC 3339 with nanoseconds
	stderr  bool
	partial bool   // the text continues in the next line of the stream
	text    []byte // without newline
}

// parseLine parses one line, with or without its newline. It returns false if the line is not a CRI
// log line. Callers skip such lines, because a crash may leave an incomplete line.
func parseLine(b []byte) (l logLine, ok bool) {
	b = bytes.TrimSuffix(b, []byte{'\n'})
	var stream, tags []byte
	if l.stamp, b, ok = bytes.Cut(b, []byte{' '}); !ok || len(l.stamp) < len("2006-01-02T15:04:05Z") {
		return l, false
	}
	if stream, b, ok = bytes.Cut(b, []byte{' '}); !ok {
		return l, false
	}
	switch string(stream) {
	case "stdout":
	case "stderr":
		l.stderr = true
	default:
		return l, false
	}
	tags, l.text, ok = bytes.Cut(b, []byte{' '})
	if !ok {
		return l, false
	}
	tag, _, _ := bytes.Cut(tags, []byte{':'})
	switch string(tag) {
	case "F":
	case "P":
		l.partial = true
	default:
		return l, false
	}
	return l, true
}

// writtenAt returns the time at which the line was written, or the zero time if its timestamp is
// invalid.
func (l logLine) writtenAt() time.Time {
	t, err := time.Parse(time.RFC3339Nano, string(l.stamp))
	if err != nil {
		return time.Time{}
	}
	return t
}
