package node

import (
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// F115: namespaces exempt from the source check are read from flags and the file. An invalid
// namespace is rejected.
func TestSourceCheckFlags(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
		says string
	}{
		{nil, nil, ""},
		{[]string{"--source-check-exempt-namespaces=vpn, routers", "--source-check-exempt-namespaces=vrrp"},
			[]string{"vpn", "routers", "vrrp"}, ""},
		{[]string{"--source-check-exempt-namespaces=*"}, []string{"*"}, ""},
		{[]string{"--source-check-exempt-namespaces=Not_A_Name"}, nil, `namespace "Not_A_Name"`},
		{[]string{"--source-check-exempt-namespaces="}, nil, `namespace ""`},
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
		if err != nil || !slices.Equal(cfg.PodNetwork.SourceExempt, c.want) {
			t.Errorf("%v: %v, namespaces %q", c.args, err, cfg.PodNetwork.SourceExempt)
		}
	}
	c, err := parseConfig(t, "source-check-exempt-namespaces: [vpn, routers]")
	if err != nil || !slices.Equal(c.PodNetwork.SourceExempt, []string{"vpn", "routers"}) {
		t.Errorf("the file: %v, namespaces %q", err, c.PodNetwork.SourceExempt)
	}
}

// F117: the default address of the proxy's health check is that of kube-proxy. An invalid address
// is rejected.
func TestProxyHealthzFlag(t *testing.T) {
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	if c := Flags(fs); c.Services.Healthz != ":10256" {
		t.Errorf("by default %q", c.Services.Healthz)
	}
	for text, want := range map[string]string{"none": "", "": "", ":10256": ":10256", "192.0.2.7:80": "192.0.2.7:80",
		"[fd00::7]:80": "[fd00::7]:80"} {
		if got, err := healthzAddress(text); err != nil || got != want {
			t.Errorf("%q is %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"10256", ":0", ":65536", "node:10256", "fd00::7:80", ":http", "192.0.2.7"} {
		c := Config{NodeName: "w1", Join: JoinConfig{Servers: []string{"192.0.2.1:6444"}},
			Services: ServiceConfig{Healthz: text}}
		if err := c.Check(); err == nil || !strings.Contains(err.Error(), "--proxy-healthz-address") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
