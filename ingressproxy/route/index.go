package route

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// Index answers what a Table says of a request. Its cost grows with the labels of the host and the elements of the
// path, with the expressions of the matching hosts, and with rules that have one host and one path; not with the table.
type Index struct {
	table *Table
	ports map[uint16]*portIndex
}

type portIndex struct {
	protocol  Protocol
	listeners *byHost[*listenerIndex]
}

type listenerIndex struct {
	listener *Listener
	rules    *byHost[*paths]
	certs    *byHost[*tls.Certificate]
}

// paths are the matches of one host, by path. Of each path the entries stand in the order in which they are asked.
type paths struct {
	exact  map[string][]*entry
	regex  []*entry
	prefix map[string][]*entry
	late   []*entry
}

// entry is one match of one rule.
type entry struct {
	rule    *Rule
	match   *Match
	place   int
	path    *regexp.Regexp
	headers []*regexp.Regexp
	query   []*regexp.Regexp
}

// Found is the rule for a request and the match that was true of it.
type Found struct {
	Listener *Listener
	Rule     *Rule
	Match    *Match
}

// Prefix is the path prefix that the request was found by, "/" when it was another kind of match.
func (f Found) Prefix() string {
	if f.Match == nil || f.Match.Path.Kind != Prefix {
		return "/"
	}
	return prefixOf(f.Match.Path.Value)
}

var everything = Match{}

// Compile makes the index of a table. What is wrong in it (an expression that is none, two protocols on a port) is
// told by errors that name rule or listener; that match or listener is left out, and all others are served.
func Compile(t *Table) (*Index, []error) {
	x := &Index{table: t, ports: map[uint16]*portIndex{}}
	var wrong []error
	for i := range t.Listeners {
		l := &t.Listeners[i]
		p := x.ports[l.Port]
		if p == nil {
			p = &portIndex{protocol: l.Protocol, listeners: newByHost[*listenerIndex]()}
			x.ports[l.Port] = p
		}
		if p.protocol != l.Protocol {
			wrong = append(wrong, fmt.Errorf("listener %s: port %d speaks %s already", l.Name, l.Port, p.protocol))
			continue
		}
		taken := false
		p.listeners.update(l.Host, func(there *listenerIndex) *listenerIndex {
			if there != nil {
				taken = true
				return there
			}
			li, errs := compileListener(l)
			wrong = append(wrong, errs...)
			return li
		})
		if taken {
			wrong = append(wrong, fmt.Errorf("listener %s: another has port %d and host %s", l.Name, l.Port, l.Host))
		}
	}
	return x, wrong
}

func compileListener(l *Listener) (*listenerIndex, []error) {
	li := &listenerIndex{listener: l, rules: newByHost[*paths](), certs: newByHost[*tls.Certificate]()}
	for _, c := range l.Certificates {
		for _, h := range c.Hosts {
			li.certs.update(h, func(there *tls.Certificate) *tls.Certificate {
				if there != nil {
					return there
				}
				return c.Pair
			})
		}
	}
	var wrong []error
	var sets []*paths
	for i := range l.Rules {
		r := &l.Rules[i]
		matches := make([]*Match, 0, len(r.Matches))
		for m := range r.Matches {
			matches = append(matches, &r.Matches[m])
		}
		if len(matches) == 0 {
			matches = append(matches, &everything)
		}
		hosts := r.Hosts
		if len(hosts) == 0 {
			hosts = []Host{{}}
		}
		for _, m := range matches {
			e, err := compileMatch(r, m, i)
			if err != nil {
				wrong = append(wrong, fmt.Errorf("listener %s: rule %s: %w", l.Name, r.Name, err))
				continue
			}
			for _, h := range hosts {
				li.rules.update(h, func(p *paths) *paths {
					if p == nil {
						p = &paths{exact: map[string][]*entry{}, prefix: map[string][]*entry{}}
						sets = append(sets, p)
					}
					p.add(e)
					return p
				})
			}
		}
	}
	for _, p := range sets {
		p.sort()
	}
	return li, wrong
}

func compileMatch(r *Rule, m *Match, place int) (*entry, error) {
	e := &entry{rule: r, match: m, place: place}
	var err error
	if m.Path.Kind == Regex || m.Path.Kind == LateRegex {
		if e.path, err = whole(m.Path.Value); err != nil {
			return nil, fmt.Errorf("path: %w", err)
		}
	}
	if e.headers, err = expressions(m.Headers); err != nil {
		return nil, fmt.Errorf("header %w", err)
	}
	if e.query, err = expressions(m.Query); err != nil {
		return nil, fmt.Errorf("query parameter %w", err)
	}
	return e, nil
}

func expressions(values []ValueMatch) ([]*regexp.Regexp, error) {
	out := make([]*regexp.Regexp, len(values))
	for i, v := range values {
		if !v.Regex {
			continue
		}
		var err error
		if out[i], err = whole(v.Value); err != nil {
			return nil, fmt.Errorf("%s: %w", v.Name, err)
		}
	}
	return out, nil
}

// whole compiles an expression that has to match all of a text.
func whole(expression string) (*regexp.Regexp, error) {
	if _, err := regexp.Compile(expression); err != nil {
		return nil, fmt.Errorf("expression %q: %w", expression, err)
	}
	return regexp.Compile(`^(?:` + expression + `)$`)
}

// CheckRegex says whether an expression may stand in a match.
func CheckRegex(expression string) error {
	_, err := whole(expression)
	return err
}

func prefixOf(path string) string {
	if path = strings.TrimRight(path, "/"); path == "" {
		return "/"
	}
	return path
}

func (p *paths) add(e *entry) {
	switch e.match.Path.Kind {
	case Exact:
		p.exact[e.match.Path.Value] = append(p.exact[e.match.Path.Value], e)
	case Regex:
		p.regex = append(p.regex, e)
	case LateRegex:
		p.late = append(p.late, e)
	default:
		key := prefixOf(e.match.Path.Value)
		p.prefix[key] = append(p.prefix[key], e)
	}
}

func (p *paths) sort() {
	for _, list := range [][]*entry{p.regex, p.late} {
		slices.SortStableFunc(list, func(a, b *entry) int {
			return cmp.Or(cmp.Compare(len(b.match.Path.Value), len(a.match.Path.Value)), order(a, b))
		})
	}
	for _, m := range []map[string][]*entry{p.exact, p.prefix} {
		for _, list := range m {
			slices.SortStableFunc(list, order)
		}
	}
}

// order is that of entries with one host and one path: those with a method first, then with more headers, then with
// more query parameters, then the earlier rule.
func order(a, b *entry) int {
	method := func(e *entry) int {
		if e.match.Method != "" {
			return 1
		}
		return 0
	}
	return cmp.Or(
		cmp.Compare(method(b), method(a)),
		cmp.Compare(len(b.match.Headers), len(a.match.Headers)),
		cmp.Compare(len(b.match.Query), len(a.match.Query)),
		cmp.Compare(a.place, b.place),
	)
}

// Table is what the index was made of.
func (x *Index) Table() *Table { return x.table }

// Ports are those of all listeners, with what they speak.
func (x *Index) Ports() map[uint16]Protocol {
	out := make(map[uint16]Protocol, len(x.ports))
	for port, p := range x.ports {
		out[port] = p.protocol
	}
	return out
}

// Listener is the one that answers for a host (HostOf) on a port, nil when there is none.
func (x *Index) Listener(port uint16, host string) *Listener {
	if li := x.listener(port, host); li != nil {
		return li.listener
	}
	return nil
}

func (x *Index) listener(port uint16, host string) (out *listenerIndex) {
	if p := x.ports[port]; p != nil {
		p.listeners.each(host, func(li *listenerIndex) bool { out = li; return false })
	}
	return out
}

// Certificate is the key pair for a client that asks for a server name ("" when for none), nil when there is none.
func (x *Index) Certificate(port uint16, name string) (pair *tls.Certificate) {
	name = HostOf(name)
	li := x.listener(port, name)
	if li == nil {
		return nil
	}
	if name != "" {
		li.certs.each(name, func(c *tls.Certificate) bool { pair = c; return false })
	}
	if pair == nil {
		pair = li.listener.Default
	}
	return pair
}

// Match finds the rule for a request that came to a port. ok is false when no rule is for it.
func (x *Index) Match(port uint16, r *http.Request) (f Found, ok bool) {
	host := HostOf(r.Host)
	li := x.listener(port, host)
	if li == nil {
		return Found{}, false
	}
	q := &question{r: r}
	li.rules.each(host, func(p *paths) bool {
		if e := p.find(q); e != nil {
			f, ok = Found{Listener: li.listener, Rule: e.rule, Match: e.match}, true
		}
		return !ok
	})
	f.Listener = li.listener
	return f, ok
}

// question is a request whose query is read once, when the first rule asks for it.
type question struct {
	r     *http.Request
	query url.Values
}

func (p *paths) find(q *question) *entry {
	path := q.r.URL.Path
	if path == "" {
		path = "/"
	}
	if e := first(p.exact[path], q); e != nil {
		return e
	}
	if e := expression(p.regex, path, q); e != nil {
		return e
	}
	for at := prefixOf(path); ; {
		if e := first(p.prefix[at], q); e != nil {
			return e
		}
		if at == "/" {
			return expression(p.late, path, q)
		}
		at = prefixOf(at[:strings.LastIndexByte(at, '/')+1])
	}
}

func expression(list []*entry, path string, q *question) *entry {
	for _, e := range list {
		if e.path.MatchString(path) && e.holds(q) {
			return e
		}
	}
	return nil
}

func first(list []*entry, q *question) *entry {
	for _, e := range list {
		if e.holds(q) {
			return e
		}
	}
	return nil
}

// holds says whether all but the path is true of a request.
func (e *entry) holds(q *question) bool {
	m := e.match
	if m.Method != "" && m.Method != q.r.Method {
		return false
	}
	for i, h := range m.Headers {
		values := q.r.Header.Values(h.Name)
		if len(values) == 0 || !h.is(strings.Join(values, ","), e.headers[i]) {
			return false
		}
	}
	for i, p := range m.Query {
		if q.query == nil {
			q.query = q.r.URL.Query()
		}
		values := q.query[p.Name]
		if len(values) == 0 || !p.is(values[0], e.query[i]) {
			return false
		}
	}
	return true
}

func (v ValueMatch) is(value string, expression *regexp.Regexp) bool {
	if expression != nil {
		return expression.MatchString(value)
	}
	return value == v.Value
}
