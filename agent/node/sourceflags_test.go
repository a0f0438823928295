package node

import (
	"flag"
	"io"
	"slices"
	"strings"
	"testing"
)

// F115: namespaces that are exempt from the check of senders are read from flags and the file; what is no namespace is refused.
func TestSourceCheckFlags(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
		says string
	}{
		{nil, nil, ""},
		{[]string{"--source-check-exempt-namespaces=vpn, routers", "--source-check-exempt-namespaces=vrrp"}, []string{"vpn", "routers", "vrrp"}, ""},
		{[]string{"--source-check-exempt-namespaces=*"}, []string{"*"}, ""},
		{[]string{"--source-check-exempt-namespaces=Not_A_Name"}, nil, `namespace "Not_A_Name"`},
		{[]string{"--source-check-exempt-namespaces="}, nil, `namespace ""`},
	} {
		fs := flag.NewFlagSet("agent", flag.ContinueOnError)
		fs.SetOutput(io.Discard)
		cfg := Flags(fs)
		err := fs.Parse(c.args)
		if c.says != "" {
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v: %v, want %q", c.args, err, c.says)
			}
			continue
		}
		if err != nil || !slices.Equal(cfg.SourceExempt, c.want) {
			t.Errorf("%v: %v, namespaces %q", c.args, err, cfg.SourceExempt)
		}
	}
	c, err := configured(t, "source-check-exempt-namespaces: [vpn, routers]")
	if err != nil || !slices.Equal(c.SourceExempt, []string{"vpn", "routers"}) {
		t.Errorf("the file: %v, namespaces %q", err, c.SourceExempt)
	}
}
