package logtail

import (
	"fmt"
	"strings"
	"testing"
)

func TestLines(t *testing.T) {
	l := New(100)
	all := ""
	for i := range 1000 {
		line := fmt.Sprintf("line %d%s\n", i, strings.Repeat("x", i%40))
		all += line
		if n, err := l.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
		have := string(l.Bytes())
		if len(have) > 100 || !strings.HasSuffix(all, have) || !strings.HasPrefix(have, "line ") ||
			len(have) < 100-50 && len(have) != len(all) {
			t.Fatalf("after %d lines it keeps %q", i+1, have)
		}
		if cap(l.kept) > 400 {
			t.Fatalf("after %d lines it uses %d bytes", i+1, cap(l.kept))
		}
	}
	if l.Write([]byte(strings.Repeat("y", 1000))); len(l.Bytes()) != 0 {
		t.Errorf("of a line that is too long, %q is kept", l.Bytes())
	}
	if (*Lines)(nil).Bytes() != nil {
		t.Error("nil Lines returns bytes")
	}
}
