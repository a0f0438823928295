package route

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
)

func TestParseHost(t *testing.T) {
	for s, want := range map[string]Host{
		"": {}, "*": {}, "A.Example": {Name: "a.example"}, "a.example.": {Name: "a.example"},
		"*.a.example": {Name: "a.example", Wildcard: OneLabel},
	} {
		if got, err := ParseHost(s, OneLabel); err != nil || got != want {
			t.Errorf("%q: %+v, %v", s, got, err)
		}
	}
	for _, s := range []string{"a.*", "*.", "*.*.a", "a*", "a/b", "a:80", "a b"} {
		if h, err := ParseHost(s, OneLabel); err == nil {
			t.Errorf("%q is taken for %v", s, h)
		}
	}
}

func TestHostOf(t *testing.T) {
	for authority, want := range map[string]string{
		"a.b": "a.b", "A.b.": "a.b", "a.b:80": "a.b", "A.B.:80": "a.b", "[::1]:80": "::1", "[::1]": "::1", "::1": "::1",
		"": "", ":80": "", "[": "[",
	} {
		if got := NormalizeHost(authority); got != want {
			t.Errorf("%q: %q, want %q", authority, got, want)
		}
	}
}

// A faulty rule or listener is reported and does not affect the others.
func TestCompileTellsFaults(t *testing.T) {
	x, wrong := Compile(&Table{Listeners: []Listener{
		{Name: "l", Port: 80, Protocol: HTTP, Rules: []Rule{
			{Name: "r", Matches: []Match{{Path: PathMatch{Regex, "/("}}, {Path: PathMatch{Exact, "/x"}}}},
			{Name: "h", Matches: []Match{{Headers: []ValueMatch{{"k", "a)|(b", true}}}}},
			{Name: "q", Matches: []Match{{Query: []ValueMatch{{"k", "[", true}}}}},
		}},
		{Name: "s", Port: 80, Protocol: HTTPS},
		{Name: "again", Port: 80, Protocol: HTTP},
	}})
	var said []string
	for _, err := range wrong {
		said = append(said, err.Error())
	}
	all := strings.Join(said, "\n")
	for _, want := range []string{"listener l: rule r: path: expression", "rule h: header k",
		"rule q: query parameter k", "listener s: port 80 already has protocol HTTP",
		"listener again: another listener has port 80 and host *"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is not said in:\n%s", want, all)
		}
	}
	if f, ok := x.Match(80, httptest.NewRequest("GET", "/x", nil)); !ok || f.Rule.Name != "r" {
		t.Errorf("/x: %+v, %v", f, ok)
	}
	if _, ok := x.Match(80, httptest.NewRequest("GET", "/y", nil)); ok {
		t.Error("a match with a broken expression is true")
	}
	if _, ok := x.Match(81, httptest.NewRequest("GET", "/x", nil)); ok {
		t.Error("a port without listener matches")
	}
}

func TestCertificateByName(t *testing.T) {
	pairs := map[string]*tls.Certificate{}
	cert := func(name string, hosts ...Host) Certificate {
		pairs[name] = &tls.Certificate{}
		return Certificate{Hosts: hosts, Pair: pairs[name]}
	}
	fallback := &tls.Certificate{}
	x, wrong := Compile(&Table{Listeners: []Listener{
		{Name: "all", Port: 443, Protocol: HTTPS, Default: fallback, Certificates: []Certificate{
			cert("exact", Host{Name: "a.x"}), cert("later", Host{Name: "a.x"}),
			cert("one", Host{Name: "x", Wildcard: OneLabel}), cert("many", Host{Name: "x", Wildcard: AnyLabels}),
		}},
		{Name: "own", Port: 443, Protocol: HTTPS, Host: Host{Name: "own.y"},
			Certificates: []Certificate{cert("own", Host{Name: "own.y"})}},
		{Name: "bare", Port: 443, Protocol: HTTPS, Host: Host{Name: "bare.y"}},
	}})
	if len(wrong) > 0 {
		t.Fatal(wrong)
	}
	for name, want := range map[string]*tls.Certificate{
		"a.x": pairs["exact"], "A.X": pairs["exact"], "b.x": pairs["one"], "c.b.x": pairs["many"], "q": fallback,
		"": fallback, "own.y": pairs["own"], "bare.y": nil,
	} {
		if got := x.Certificate(443, name); got != want {
			t.Errorf("%q: another certificate", name)
		}
	}
	if l := x.Listener(443, "own.y"); l == nil || l.Name != "own" {
		t.Errorf("own.y is for %v", l)
	}
	if x.Certificate(80, "a.x") != nil {
		t.Error("a port without listener has a certificate")
	}
}

func TestChooseByWeight(t *testing.T) {
	backends := []Backend{{Pool: "a", Weight: 1}, {Pool: "none"}, {Pool: "b", Weight: 3}}
	count := map[string]int{}
	for n := range uint64(400) {
		b, ok := ChooseBackend(backends, n)
		if !ok {
			t.Fatal("none is chosen")
		}
		count[b.Pool]++
	}
	if count["a"] != 100 || count["b"] != 300 || count["none"] != 0 {
		t.Errorf("%v", count)
	}
	if b, ok := ChooseBackend([]Backend{{Pool: "a"}}, 7); ok {
		t.Errorf("%+v is chosen by weight 0", b)
	}
	if !(Mirror{}).Samples(5) || (Mirror{Numerator: 1, Denominator: 4}).Samples(1) ||
		!(Mirror{Numerator: 2, Denominator: 4}).Samples(9) {
		t.Error("mirrors are chosen otherwise")
	}
}

func TestHeaders(t *testing.T) {
	h := http.Header{"A": {"1"}, "B": {"1"}, "C": {"1"}}
	Headers{Remove: []string{"a"}, Set: []Header{{"b", "2"}}, Add: []Header{{"c", "2"}, {"a", "3"}}}.ModifyHeader(h)
	if got, want := fmt.Sprint(h), "map[A:[3] B:[2] C:[1 2]]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// The table of Gateway API's HTTPPathModifier, and percent-encoded paths.
func TestPathChange(t *testing.T) {
	for _, c := range []struct{ path, prefix, value, want string }{
		{"/foo/bar", "/foo", "/xyz", "/xyz/bar"},
		{"/foo/bar", "/foo", "/xyz/", "/xyz/bar"},
		{"/foo/bar", "/foo/", "/xyz", "/xyz/bar"},
		{"/foo", "/foo", "/xyz", "/xyz"},
		{"/foo/", "/foo", "/xyz", "/xyz/"},
		{"/foo/bar", "/foo", "", "/bar"},
		{"/foo/", "/foo", "", "/"},
		{"/foo", "/foo", "", "/"},
		{"/foo", "/foo", "/", "/"},
		{"/bar", "/", "/xyz", "/xyz/bar"},
		{"/f%6fo/b%2Fr", "/foo", "/x y", "/x%20y/b%2Fr"},
	} {
		u, err := url.Parse(c.path)
		if err != nil {
			t.Fatal(err)
		}
		(&PathChange{Value: c.value, Prefix: true}).RewritePath(u, c.prefix)
		if got := u.EscapedPath(); got != c.want {
			t.Errorf("%s without %s and with %q: %s, want %s", c.path, c.prefix, c.value, got, c.want)
		}
	}
	u := &url.URL{Path: "/a/b"}
	(&PathChange{Value: "/all"}).RewritePath(u, "/a")
	if u.Path != "/all" {
		t.Errorf("the whole path becomes %s", u.Path)
	}
}

func TestRedirect(t *testing.T) {
	for _, c := range []struct {
		d      Redirect
		scheme string
		port   uint16
		target string
		want   string
	}{
		{Redirect{Scheme: "https"}, "http", 8080, "http://a.x:8080/p?q=1", "https://a.x/p?q=1"},
		{Redirect{Host: "b.y"}, "http", 80, "http://a.x/p", "http://b.y/p"},
		{Redirect{Host: "b.y"}, "http", 8080, "http://a.x/p", "http://b.y:8080/p"},
		{Redirect{Port: 443}, "https", 8443, "http://a.x/p", "https://a.x/p"},
		{Redirect{Scheme: "https", Port: 8443}, "http", 80, "http://a.x/p", "https://a.x:8443/p"},
		{Redirect{Path: &PathChange{Value: "/n", Prefix: true}}, "http", 80, "http://a.x/p/q%2F", "http://a.x/n/q%2F"},
		{Redirect{}, "http", 80, "http://[::1]/p", "http://[::1]/p"},
	} {
		r := httptest.NewRequest("GET", c.target, nil)
		if got := c.d.Location(r, c.scheme, c.port, "/p"); got != c.want {
			t.Errorf("%+v of %s: %s, want %s", c.d, c.target, got, c.want)
		}
	}
	if (&Redirect{}).StatusCode() != 302 || (&Redirect{Status: 308}).StatusCode() != 308 {
		t.Error("another status")
	}
}

// The cost of a request does not grow with the number of hosts in the table.
func BenchmarkMatch(b *testing.B) {
	for _, hosts := range []int{10, 10_000} {
		var rules []Rule
		for i := range hosts {
			rules = append(rules, Rule{Hosts: []Host{{Name: fmt.Sprintf("h%d.example", i)}},
				Matches: []Match{{Path: PathMatch{Value: "/api"}}, {}}})
		}
		x, _ := Compile(&Table{Listeners: []Listener{{Port: 80, Protocol: HTTP, Rules: rules}}})
		r := httptest.NewRequest("GET", "http://h7.example/api/v1/things", nil)
		b.Run(fmt.Sprint(hosts), func(b *testing.B) {
			for b.Loop() {
				if _, ok := x.Match(80, r); !ok {
					b.Fatal("no match")
				}
			}
		})
	}
}

func TestPorts(t *testing.T) {
	x, _ := Compile(&Table{Listeners: []Listener{{Port: 80, Protocol: HTTP}, {Port: 443, Protocol: HTTPS},
		{Port: 443, Protocol: HTTPS, Host: Host{Name: "a"}}}})
	var got []string
	for port, p := range x.Ports() {
		got = append(got, fmt.Sprint(port, p))
	}
	slices.Sort(got)
	if fmt.Sprint(got) != "[443HTTPS 80HTTP]" && fmt.Sprint(got) != "[443 HTTPS 80 HTTP]" {
		t.Errorf("%v", got)
	}
}
