package corefile

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// The common Corefiles of clusters are supported completely.
func TestCommonFiles(t *testing.T) {
	for name, text := range map[string]string{
		"default":        Default,
		"another domain": DefaultFor("prod.example."),
		"stub domains": `
.:53 {
    errors
    health {
       lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30 {
       disable success cluster.local
       disable denial cluster.local
    }
    loop
    reload
    loadbalance
}
consul.local:53 {
    errors
    cache 30
    forward . 10.150.0.1
}`} {
		c, err := ParseConfig(text)
		if err != nil || len(c.Warnings) != 0 {
			t.Errorf("%s: %v %v", name, err, c)
		}
	}
	c, err := ParseConfig(DefaultFor("prod.example."))
	if err != nil {
		t.Fatal(err)
	}
	s := c.Servers[0]
	if fmt.Sprint(s.Zones, s.Kubernetes.Zones, s.Kubernetes.Reverse, s.Kubernetes.Fall.Zones) !=
		"[.] [prod.example.] [in-addr.arpa. ip6.arpa.] [in-addr.arpa. ip6.arpa.]" ||
		s.Kubernetes.TTL != 30 || s.Cache.MaxTTL != 30*time.Second || s.Cache.MaxDenialTTL != 30*time.Second ||
		s.Forwards[0].To[0] != "/etc/resolv.conf" || c.Health || c.Ready || c.Prometheus {
		t.Errorf("%+v %+v %+v", s, s.Kubernetes, s.Cache)
	}
}

// Every option has its effect on the configuration.
func TestOptions(t *testing.T) {
	c, err := ParseConfig(`
example.com:53 10.1.0.0/16 fd00::/16 dns://other.test { # comment
    cache 1h {
        success 100 60 5
        denial 10 20
        serve_stale 2h verify
        servfail 1s
    }
    forward . 192.0.2.1 tls://192.0.2.2%dns.example 192.0.2.3:5353 [2001:db8::1]:53 {
        except a.example b.example
        policy sequential
        force_tcp
        max_fails 3
        max_concurrent 7
        health_check 2s
    }
    hosts {
        192.0.2.7 "a.b" c
        ttl 9
        no_reverse
        fallthrough x.test
    }
    rewrite continue name prefix a- b-
    rewrite stop {
        name regex (.*)\.in\.example {1}.svc
        answer name (.*)\.svc {1}.in.example
    }
    rewrite type HTTPS A
    bufsize 700
}`)
	if err != nil || len(c.Warnings) > 0 {
		t.Fatal(err, c)
	}
	s := c.Servers[0]
	if got := strings.Join(s.Zones, " "); got != "example.com. 1.10.in-addr.arpa. 0.0.d.f.ip6.arpa. other.test." {
		t.Errorf("zones %s", got)
	}
	k := s.Cache
	if k.Capacity != 100 || k.MaxTTL != time.Minute || k.MinTTL != 5*time.Second || k.CapacityDenied != 10 ||
		k.MaxDenialTTL != 20*time.Second || k.Stale != 2*time.Hour || !k.StaleVerify || k.ServFail != time.Second {
		t.Errorf("cache %+v", k)
	}
	f := s.Forwards[0]
	if len(f.To) != 4 || len(f.Except) != 2 || f.Policy != "sequential" || !f.ForceTCP || f.MaxFails != 3 ||
		f.MaxConcurrent != 7 || f.HealthEvery != 2*time.Second {
		t.Errorf("forward %+v", f)
	}
	if u, err := ParseUpstream(f.To[1]); err != nil || !u.TLS || u.Server != "dns.example" ||
		u.Address.String() != "192.0.2.2:853" {
		t.Errorf("%+v %v", u, err)
	}
	h := s.Hosts
	if h.File != "" || len(h.Inline) != 1 || h.TTL != 9 || h.Reverse || !h.Fall.Includes("a.x.test.") ||
		h.Fall.Includes("y.test.") {
		t.Errorf("hosts %+v", h)
	}
	if len(s.Rewrites) != 3 || !s.Rewrites[0].Continue || s.Rewrites[1].Pattern == nil ||
		len(s.Rewrites[1].Answers) != 1 || s.Rewrites[2].ToType != 1 || s.BufferSize != 700 {
		t.Errorf("rewrites %+v", s.Rewrites)
	}
}

// An invalid directive is rejected with its line. An unknown directive is reported with its line,
// and the rest remains effective.
func TestRefusals(t *testing.T) {
	for text, want := range map[string]string{
		"":                                      "line 1: no server block is for port 53",
		".:53 {\n errors\n":                     "line 1: the { is not closed",
		".:53 {\n}\n}\n":                        "line 3: a } closes nothing",
		".:53\n":                                "line 1: the server block has no { ... }",
		".:53 {\n}\n.:53 {\n}\n":                "line 3: zone . is configured twice",
		".:53 {\n { \n}\n}\n":                   "line 2: a { stands where",
		".:53 {\n a \"b\n}\n":                   "line 2: a quote is not closed",
		".:53 {\n forward .\n}":                 "line 2: forward wants a zone and at least one server",
		".:53 {\n forward . a\n}":               "line 2: forward: a: want an address",
		".:53 {\n forward . https://1.2.3.4\n}": "line 2: forward: https://1.2.3.4: want an address",
		".:53 {\n kubernetes cluster.local {\n ttl x\n }\n}": "line 3: kubernetes: ttl x: want a " +
			"number from 0 to 3600",
		".:53 {\n kubernetes in-addr.arpa\n}":                   "line 2: kubernetes needs the cluster's zone",
		".:53 {\n cache {\n success a\n }\n}":                   "line 3: cache: success a: want a number",
		".:53 {\n hosts {\n 1.2.3 a\n }\n}":                     "line 3: hosts: 1.2.3 is neither",
		".:53 {\n rewrite name regex ( b\n}":                    "line 2: rewrite name regex (:",
		".:53 {\n rewrite name a b answer\n}":                   "line 2: rewrite: want answer auto",
		".:53 {\n a {\n b {\n c {\n d {\n e\n }\n }\n }\n }\n}": "line 5: braces are nested deeper than 4",
		strings.Repeat("a", MaxText+1):                          "line 1: the text has",
	} {
		_, err := ParseConfig(text)
		var e *Error
		if !errors.As(err, &e) || !strings.HasPrefix(err.Error(), "Corefile "+want) {
			t.Errorf("%.60q: %v\nwant %s", text, err, want)
		}
	}
	for text, want := range map[string]string{
		".:53 {\n template IN A {\n answer x\n }\n errors\n}": "line 2: plugin template is not understood",
		".:53 {\n kubernetes cluster.local {\n pods verified\n}\n}": "line 3: kubernetes: pods verified " +
			"is not understood",
		".:53 {\n}\ntls://a.test {\n}":            "line 3: tls://a.test: only plain DNS is served",
		".:53 {\n}\na.test:5353 {\n}":             "line 3: a.test:5353: only port 53 is served",
		"(snip) {\n errors\n}\n.:53 {\n}":         "line 1: snippets are not understood",
		".:53 {\n import x\n}":                    "line 2: plugin import is not understood",
		".:53 {\n rewrite ttl a 5\n}":             "line 2: rewrite ttl is not understood",
		".:53 {\n cache 30 {\n prefetch 5\n }\n}": "line 3: cache: prefetch is not understood",
	} {
		c, err := ParseConfig(text)
		if err != nil || len(c.Warnings) != 1 || !strings.HasPrefix(c.Warnings[0].String(), want) ||
			len(c.Servers) != 1 {
			t.Errorf("%q: %v %v\nwant %s", text, err, c, want)
		}
	}
}

// No text causes a panic or takes long to parse.
func FuzzRead(f *testing.F) {
	f.Add(Default)
	f.Add(".:53 {\n rewrite stop {\n name regex (.*) {1}\n answer auto\n }\n}")
	f.Add("a {\n forward . tls://[::1]:1%x { except y }\n}\n(b) { }")
	f.Add("10.0.0.0/8 fd00::/8 {\n hosts x y {\n ::1 a\n }\n}")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := ParseConfig(text)
		if err != nil {
			return
		}
		if len(c.Servers) == 0 || len(c.Warnings) > maxWarnings {
			t.Errorf("%q: %d servers, %d warnings", text, len(c.Servers), len(c.Warnings))
		}
	})
}
