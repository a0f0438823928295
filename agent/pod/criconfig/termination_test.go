package criconfig

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A termination message from the log equals the container's output, byte for byte.
func TestTerminationMessageFromLog(t *testing.T) {
	stamp := "2026-11-20T13:04:05.123456789Z "
	for log, want := range map[string]string{
		stamp + "stdout F one\n" + stamp + "stderr P two\n":                      "one\ntwo",
		stamp + "stdout F one\n":                                                 "one\n",
		stamp + "stdout P a\n" + stamp + "stdout P b\n" + stamp + "stdout F c\n": "abc\n",
		"": "said by the runtime",
		strings.Repeat(stamp+"stdout F x\n", 100):                             strings.Repeat("x\n", maxMessageLines),
		stamp + "stdout P " + strings.Repeat("y", 3*maxMessageLog) + "\n":     strings.Repeat("y", maxMessageLog),
		strings.Repeat(stamp+"stdout P "+strings.Repeat("z", 16<<10)+"\n", 3): strings.Repeat("z", maxMessageLog),
	} {
		file := filepath.Join(t.TempDir(), "0.log")
		if err := os.WriteFile(file, []byte(log), 0o600); err != nil {
			t.Fatal(err)
		}
		b := New(Config{}, nil)
		got := b.ReadTerminationMessage(&v1.Pod{},
			&cri.ContainerStatus{ExitCode: 1, LogPath: file, Message: "said by the runtime",
				Annotations: map[string]string{annotationMessagePolicy: string(
					v1.TerminationMessageFallbackToLogsOnError)}})
		if got != want {
			t.Errorf("log %.60q…: %q, want %q", log, got, want)
		}
	}
}
