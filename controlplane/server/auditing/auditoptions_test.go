package auditing

import (
	"strings"
	"testing"
)

// An invalid option is refused, and the error names the flag.
func TestOptionsAreChecked(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"--audit-log-maxsize 0":    func(o *Options) { o.MaxSize = 0 },
		"--audit-log-maxbackup -1": func(o *Options) { o.MaxBackups = -1 },
		"--audit-log-mode \"x\"":   func(o *Options) { o.Mode = "x" },
	} {
		o := Default()
		change(&o)
		if err := o.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
