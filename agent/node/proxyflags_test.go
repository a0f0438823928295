package node

import (
	"io"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"keelson.dev/keelson/agent/proxy"
)

// F115 F117: flags configure the Service proxy; invalid values are rejected with valid examples.
func TestProxyFlags(t *testing.T) {
	for _, c := range []struct {
		args []string
		mode proxy.Mode
		at   int
		says string
	}{
		{nil, proxy.ModeNFTables, 0, ""},
		{[]string{"--proxy-mode=iptables", "--nodeport-addresses=10.0.0.7/8,fd00::/64"}, proxy.ModeIPTables, 2, ""},
		{[]string{"--proxy-mode=none"}, proxy.ModeNone, 0, ""},
		{[]string{"--proxy-mode=userspace"}, "", 0, "nftables, iptables, ipvs or none"},
		{[]string{"--nodeport-addresses=primary"}, "", 0, "192.0.2.7/32"},
		{[]string{"--nodeport-addresses=10.0.0.0/8", "--nodeport-addresses=10.1.0.0/16"}, "", 0, "overlaps"},
	} {
		fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		fs.SetOutput(io.Discard)
		cfg := Flags(fs)
		err := fs.Parse(c.args)
		if c.says != "" {
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v: %v, want %q", c.args, err, c.says)
			}
			continue
		}
		if err != nil || cfg.Services.Mode != c.mode || len(cfg.Services.NodePortAddresses) != c.at {
			t.Errorf("%v: %v, mode %s, node ports at %v", c.args, err, cfg.Services.Mode,
				cfg.Services.NodePortAddresses)
		}
	}
}
