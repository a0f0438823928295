package hclogger

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
)

// What raft leaves to its logger to format is formatted.
func TestLoggerFormats(t *testing.T) {
	var out bytes.Buffer
	l := New(slog.New(slog.NewTextHandler(&out, nil)))
	l.Info("restored", "percent", hclog.Fmt("%0.2f%%", 12.346), "index", 7)
	if line := out.String(); !strings.Contains(line, "12.35%") || !strings.Contains(line, "index=7") {
		t.Error(line)
	}
	if strings.Contains(out.String(), "%0.2f") {
		t.Errorf("the format itself is written: %s", out.String())
	}
}
