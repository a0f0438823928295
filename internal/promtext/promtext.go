// Package promtext writes metrics in the Prometheus text format, version 0.0.4.
package promtext

import (
	"bufio"
	"io"
	"strconv"
	"strings"
	"time"
)

// ContentType is the Content-Type of a response in this format.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// Kinds of metric families.
const (
	Counter   = "counter"
	Gauge     = "gauge"
	Histogram = "histogram"
)

// Writer writes metric families. It allocates no memory per sample. It is not safe for concurrent
// use.
type Writer struct {
	out         *bufio.Writer // records write errors; Flush returns them
	family      family
	headWritten bool // the HELP and TYPE lines of the family are written
	line        []byte
}

type family struct{ name, kind, help string }

// NewWriter returns a Writer that writes to output. The caller must call Flush.
func NewWriter(output io.Writer) *Writer { return &Writer{out: bufio.NewWriter(output)} }

// Labels are the labels of a sample in the text format, without braces.
type Labels string

var labelEscaper = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// FormatLabels returns the labels for alternating names and values. The Labels of an object can be
// used for all of its samples.
func FormatLabels(pairs ...string) Labels { return Labels(appendLabels(nil, "", pairs)) }

// appendLabels appends labels and alternating names and values to b, separated by commas.
func appendLabels(b []byte, labels Labels, pairs []string) []byte {
	b = append(b, labels...)
	separate := len(labels) > 0
	for i := 0; i+1 < len(pairs); i += 2 {
		if separate {
			b = append(b, ',')
		}
		separate = true
		b = append(append(b, pairs[i]...), `="`...)
		b = append(append(b, labelEscaper.Replace(pairs[i+1])...), '"')
	}
	return b
}

// StartFamily starts a metric family of the given kind. A family without samples is not written.
func (w *Writer) StartFamily(name, kind, help string) {
	w.family, w.headWritten = family{name, kind, help}, false
}

// WriteSample writes one sample of the current family. pairs are alternating names and values of
// additional labels. at is the sample's timestamp; a zero time is omitted.
func (w *Writer) WriteSample(value float64, at time.Time, labels Labels, pairs ...string) {
	w.writeLine("", value, at, labels, pairs)
}

// writeLine writes one line whose name is the family's name and a suffix.
func (w *Writer) writeLine(suffix string, value float64, at time.Time, labels Labels, pairs []string) {
	f := &w.family
	if !w.headWritten {
		w.headWritten = true
		for _, part := range []string{"# HELP ", f.name, " ", f.help, "\n# TYPE ", f.name, " ", f.kind, "\n"} {
			_, _ = w.out.WriteString(part)
		}
	}
	b := append(append(w.line[:0], f.name...), suffix...)
	if len(labels) > 0 || len(pairs) > 0 {
		b = append(appendLabels(append(b, '{'), labels, pairs), '}')
	}
	b = strconv.AppendFloat(append(b, ' '), value, 'g', -1, 64)
	if !at.IsZero() {
		b = strconv.AppendInt(append(b, ' '), at.UnixMilli(), 10)
	}
	w.line = append(b, '\n')
	_, _ = w.out.Write(w.line)
}

// Flush writes buffered data and returns the first write error.
func (w *Writer) Flush() error { return w.out.Flush() }
