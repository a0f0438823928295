package route

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// rank is the specificity of a match for a request according to Gateway API; larger ranks are tried
// first. It is independent of the index.
type rank [8]int

func (a rank) above(b rank) bool {
	for i := range a {
		if a[i] != b[i] {
			return a[i] > b[i]
		}
	}
	return false
}

func oracleHost(h Host, name string) (rank2 int, ok bool) {
	labels := strings.Split(name, ".")
	want := strings.Split(h.Name, ".")
	switch {
	case h.Name == "":
		return 0, true
	case h.Wildcard == NoWildcard:
		return 1 << 20, name == h.Name
	case len(labels) <= len(want) || strings.Join(labels[len(labels)-len(want):], ".") != h.Name:
		return 0, false
	case h.Wildcard == OneLabel:
		return 2*len(h.Name) + 1, len(labels) == len(want)+1
	}
	return 2 * len(h.Name), true
}

func elements(path string) []string { return strings.Split(strings.TrimRight(path, "/"), "/") }

func oraclePath(p PathMatch, path string) (kind, size int, ok bool) {
	switch p.Kind {
	case Exact:
		return 2, 0, p.Value == path
	case Regex:
		return 1, len(p.Value), regexp.MustCompile(`\A(` + p.Value + `)\z`).MatchString(path)
	}
	have, want := elements(path), elements(p.Value)
	if len(want) > len(have) {
		return 0, 0, false
	}
	for i := range want {
		if want[i] != have[i] {
			return 0, 0, false
		}
	}
	return 0, len(strings.TrimRight(p.Value, "/")), true
}

func oracleValue(v ValueMatch, have string, there bool) bool {
	if !there {
		return false
	}
	if v.Regex {
		return regexp.MustCompile(`\A(` + v.Value + `)\z`).MatchString(have)
	}
	return have == v.Value
}

func oracle(l *Listener, r *http.Request) (best *Rule, which *Match) {
	var top rank
	for i := range l.Rules {
		rule := &l.Rules[i]
		matches, hosts := rule.Matches, rule.Hosts
		if len(matches) == 0 {
			matches = []Match{{}}
		}
		if len(hosts) == 0 {
			hosts = []Host{{}}
		}
		for m := range matches {
			match := &matches[m]
			kind, size, ok := oraclePath(match.Path, r.URL.Path)
			if !ok || match.Method != "" && match.Method != r.Method {
				continue
			}
			for _, h := range match.Headers {
				ok = ok && oracleValue(h, strings.Join(r.Header[http.CanonicalHeaderKey(h.Name)], ","),
					len(r.Header[http.CanonicalHeaderKey(h.Name)]) > 0)
			}
			for _, q := range match.Query {
				values := r.URL.Query()
				ok = ok && oracleValue(q, values.Get(q.Name), values.Has(q.Name))
			}
			if !ok {
				continue
			}
			for _, h := range hosts {
				host, ok := oracleHost(h, r.Host)
				if !ok {
					continue
				}
				method := 0
				if match.Method != "" {
					method = 1
				}
				at := rank{host, kind, size, method, len(match.Headers), len(match.Query), -i, -m}
				if best == nil || at.above(top) {
					best, which, top = rule, match, at
				}
			}
		}
	}
	return best, which
}

var (
	someHost = rapid.Custom(func(t *rapid.T) Host {
		return Host{
			Name:     rapid.SampledFrom([]string{"a.x", "x", "b.a.x", "c.b.a.x", "y", "a.y"}).Draw(t, "name"),
			Wildcard: Wildcard(rapid.IntRange(0, 2).Draw(t, "wild")),
		}
	})
	somePath  = rapid.SampledFrom([]string{"/", "/a", "/a/", "/a/b", "/a/b/", "/ab", "/a/b/c", "/a//b", "//a", "/b"})
	someValue = rapid.Custom(func(t *rapid.T) ValueMatch {
		v := ValueMatch{Name: rapid.SampledFrom([]string{"k", "l"}).Draw(t, "k"),
			Value: rapid.SampledFrom([]string{"1", "2", ""}).Draw(t, "v")}
		if v.Regex = rapid.Bool().Draw(t, "regex"); v.Regex {
			v.Value = rapid.SampledFrom([]string{"1|2", "[0-9]*", "2"}).Draw(t, "expression")
		}
		return v
	})
	someMatch = rapid.Custom(func(t *rapid.T) Match {
		m := Match{
			Path:    PathMatch{Kind: PathKind(rapid.IntRange(0, 2).Draw(t, "kind")), Value: somePath.Draw(t, "path")},
			Method:  rapid.SampledFrom([]string{"", "", "GET", "PUT"}).Draw(t, "method"),
			Headers: rapid.SliceOfN(someValue, 0, 2).Draw(t, "headers"),
			Query:   rapid.SliceOfN(someValue, 0, 2).Draw(t, "query"),
		}
		if m.Path.Kind == Regex {
			m.Path.Value = rapid.SampledFrom([]string{"/a.*", "/a|/b", "/[ab]/?", "/.*/c"}).Draw(t, "expression")
		}
		return m
	})
	someRule = rapid.Custom(func(t *rapid.T) Rule {
		return Rule{
			Hosts:   rapid.SliceOfN(someHost, 0, 2).Draw(t, "hosts"),
			Matches: rapid.SliceOfN(someMatch, 0, 3).Draw(t, "matches"),
		}
	})
)

func someRequest(t *rapid.T) *http.Request {
	r := httptest.NewRequest(rapid.SampledFrom([]string{"GET", "PUT", "POST"}).Draw(t, "method"), "/", nil)
	r.Host = rapid.SampledFrom([]string{"a.x", "x", "b.a.x", "c.b.a.x", "d.c.b.a.x", "y", "z.y", "q"}).Draw(t, "host")
	r.URL.Path = somePath.Draw(t, "path")
	for _, name := range []string{"K", "L"} {
		for _, v := range rapid.SliceOfN(rapid.SampledFrom([]string{"1", "2"}), 0, 2).Draw(t, "header") {
			r.Header.Add(name, v)
		}
	}
	r.URL.RawQuery = rapid.SampledFrom([]string{"", "k=1", "k=2&k=1", "l=2", "k=&l=1", "l=%31"}).Draw(t, "query")
	return r
}

// The index selects the rule that Gateway API's precedence selects.
func TestMatchIsTheOraclesChoice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rules := rapid.SliceOfN(someRule, 1, 12).Draw(t, "rules")
		for i := range rules {
			rules[i].Name = fmt.Sprint(i)
		}
		table := &Table{Listeners: []Listener{{Name: "l", Port: 80, Protocol: HTTP, Rules: rules}}}
		x, wrong := Compile(table)
		if len(wrong) > 0 {
			t.Fatal(wrong)
		}
		for range 8 {
			r := someRequest(t)
			want, match := oracle(&table.Listeners[0], r)
			got, ok := x.Match(80, r)
			if ok != (want != nil) || ok && (got.Rule != want || len(want.Matches) > 0 && got.Match != match) {
				t.Fatalf("%s %s%s: rule %+v by %+v, want %+v by %+v", r.Method, r.Host, r.URL, got.Rule,
					got.Match, want, match)
			}
		}
	})
}

// The intersection of two hosts matches exactly the names that both match.
func TestIntersectIsBoth(t *testing.T) {
	names := []string{"x", "a.x", "b.a.x", "c.b.a.x", "d.c.b.a.x", "y", "a.y", "z.a.y"}
	rapid.Check(t, func(t *rapid.T) {
		a, b := someHost.Draw(t, "a"), someHost.Draw(t, "b")
		both, ok := a.Intersect(b)
		for _, name := range names {
			if got, want := ok && both.Matches(name), a.Matches(name) && b.Matches(name); got != want {
				t.Fatalf("%v and %v are %v (%v): of %s %v, want %v", a, b, both, ok, name, got, want)
			}
			if _, want := oracleHost(a, name); a.Matches(name) != want {
				t.Fatalf("%+v of %s: %v", a, name, !want)
			}
		}
	})
}
