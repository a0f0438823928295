package stream

import (
	"bytes"
	"time"
)

// line is one line of a log in CRI's format: "TIME STREAM TAGS TEXT".
type line struct {
	stamp   []byte // as written, RFC 3339 with nanoseconds
	stderr  bool
	partial bool   // the text goes on in the stream's next line
	text    []byte // without the newline
}

// parseLine reads one line, with or without its newline. ok is false for what is no
// CRI log line; such lines are passed over, since a crash may leave half of one.
func parseLine(b []byte) (l line, ok bool) {
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

// time returns when the line was written; zero when the stamp does not parse.
func (l line) time() time.Time {
	t, err := time.Parse(time.RFC3339Nano, string(l.stamp))
	if err != nil {
		return time.Time{}
	}
	return t
}
