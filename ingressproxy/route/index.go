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

// Index is a compiled Table, in which the rule for a request is found quickly. The cost of a lookup
// grows with the labels of the host, the elements of the path, and the regular expressions of the
// matching hosts. It also grows with the rules that share one host and path, but not with the size
// of the table.
type Index struct {
	table *Table
	ports map[uint16]*portIndex
}

type portIndex struct {
	protocol  Protocol
	listeners *hostMap[*listenerIndex]
}

type listenerIndex struct {
	listener *Listener
	rules    *hostMap[*pathIndex]
	certs    *hostMap[*tls.Certificate]
}

// pathIndex holds the entries of one host by path. The entries of one path are in the order in
// which they are compared with a request.
type pathIndex struct {
	exact     map[string][]*entry
	regex     []*entry
	prefix    map[string][]*entry
	lateRegex []*entry
}

// entry is one of the Matches of a rule, compiled.
type entry struct {
	rule       *Rule
	match      *Match
	ruleNumber int
	path       *regexp.Regexp
	headers    []*regexp.Regexp
	query      []*regexp.Regexp
}

// Found is the result of Index.Match: the listener and the rule for a request, and the Match of the
// rule that the request meets.
type Found struct {
	Listener *Listener
	Rule     *Rule
	Match    *Match
}

// Prefix returns the path prefix of the rule's match. It returns "/" if the path was matched in
// another way.
func (f Found) Prefix() string {
	if f.Match == nil || f.Match.Path.Kind != Prefix {
		return "/"
	}
	return normalizePrefix(f.Match.Path.Value)
}

var matchAll = Match{}

// Compile builds the Index of a table. It omits a match that cannot be compiled, and a listener
// that conflicts with an earlier listener on its port. Each of these causes an error that names the
// rule or the listener; everything else is served.
func Compile(t *Table) (*Index, []error) {
	x := &Index{table: t, ports: map[uint16]*portIndex{}}
	var wrong []error
	for i := range t.Listeners {
		l := &t.Listeners[i]
		p := x.ports[l.Port]
		if p == nil {
			p = &portIndex{protocol: l.Protocol, listeners: newHostMap[*listenerIndex]()}
			x.ports[l.Port] = p
		}
		if p.protocol != l.Protocol {
			wrong = append(wrong, fmt.Errorf("listener %s: port %d already has protocol %s", l.Name,
				l.Port, p.protocol))
			continue
		}
		taken := false
		p.listeners.updateHost(l.Host, func(there *listenerIndex) *listenerIndex {
			if there != nil {
				taken = true
				return there
			}
			li, errs := compileListener(l)
			wrong = append(wrong, errs...)
			return li
		})
		if taken {
			wrong = append(wrong, fmt.Errorf("listener %s: another listener has port %d and host %s", l.Name,
				l.Port, l.Host))
		}
	}
	return x, wrong
}

func compileListener(l *Listener) (*listenerIndex, []error) {
	li := &listenerIndex{listener: l, rules: newHostMap[*pathIndex](), certs: newHostMap[*tls.Certificate]()}
	for _, c := range l.Certificates {
		for _, h := range c.Hosts {
			li.certs.updateHost(h, func(there *tls.Certificate) *tls.Certificate {
				if there != nil {
					return there
				}
				return c.Pair
			})
		}
	}
	var wrong []error
	var sets []*pathIndex
	for i := range l.Rules {
		r := &l.Rules[i]
		matches := make([]*Match, 0, len(r.Matches))
		for m := range r.Matches {
			matches = append(matches, &r.Matches[m])
		}
		if len(matches) == 0 {
			matches = append(matches, &matchAll)
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
				li.rules.updateHost(h, func(p *pathIndex) *pathIndex {
					if p == nil {
						p = &pathIndex{exact: map[string][]*entry{}, prefix: map[string][]*entry{}}
						sets = append(sets, p)
					}
					p.addEntry(e)
					return p
				})
			}
		}
	}
	for _, p := range sets {
		p.sortEntries()
	}
	return li, wrong
}

func compileMatch(r *Rule, m *Match, place int) (*entry, error) {
	e := &entry{rule: r, match: m, ruleNumber: place}
	var err error
	if m.Path.Kind == Regex || m.Path.Kind == LateRegex {
		if e.path, err = compileFullMatch(m.Path.Value); err != nil {
			return nil, fmt.Errorf("path: %w", err)
		}
	}
	if e.headers, err = compileValueRegexes(m.Headers); err != nil {
		return nil, fmt.Errorf("header %w", err)
	}
	if e.query, err = compileValueRegexes(m.Query); err != nil {
		return nil, fmt.Errorf("query parameter %w", err)
	}
	return e, nil
}

func compileValueRegexes(values []ValueMatch) ([]*regexp.Regexp, error) {
	out := make([]*regexp.Regexp, len(values))
	for i, v := range values {
		if !v.Regex {
			continue
		}
		var err error
		if out[i], err = compileFullMatch(v.Value); err != nil {
			return nil, fmt.Errorf("%s: %w", v.Name, err)
		}
	}
	return out, nil
}

// compileFullMatch compiles a regular expression so that it must match a whole text.
func compileFullMatch(expression string) (*regexp.Regexp, error) {
	if _, err := regexp.Compile(expression); err != nil {
		return nil, fmt.Errorf("expression %q: %w", expression, err)
	}
	return regexp.Compile(`^(?:` + expression + `)$`)
}

// CheckRegex returns an error if expression cannot be used as a regular expression in a rule.
func CheckRegex(expression string) error {
	_, err := compileFullMatch(expression)
	return err
}

func normalizePrefix(path string) string {
	if path = strings.TrimRight(path, "/"); path == "" {
		return "/"
	}
	return path
}

func (p *pathIndex) addEntry(e *entry) {
	switch e.match.Path.Kind {
	case Exact:
		p.exact[e.match.Path.Value] = append(p.exact[e.match.Path.Value], e)
	case Regex:
		p.regex = append(p.regex, e)
	case LateRegex:
		p.lateRegex = append(p.lateRegex, e)
	default:
		key := normalizePrefix(e.match.Path.Value)
		p.prefix[key] = append(p.prefix[key], e)
	}
}

func (p *pathIndex) sortEntries() {
	for _, list := range [][]*entry{p.regex, p.lateRegex} {
		slices.SortStableFunc(list, func(a, b *entry) int {
			return cmp.Or(cmp.Compare(len(b.match.Path.Value), len(a.match.Path.Value)), compareEntries(a, b))
		})
	}
	for _, m := range []map[string][]*entry{p.exact, p.prefix} {
		for _, list := range m {
			slices.SortStableFunc(list, compareEntries)
		}
	}
}

// compareEntries compares two entries of one host and path by their order of evaluation. An entry
// with a method comes first, then an entry with more headers, then one with more query parameters.
// Among equal entries, that of the earlier rule comes first.
func compareEntries(a, b *entry) int {
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
		cmp.Compare(a.ruleNumber, b.ruleNumber),
	)
}

// Table returns the table from which the index was compiled.
func (x *Index) Table() *Table { return x.table }

// Ports returns the protocol of each port that has a listener.
func (x *Index) Ports() map[uint16]Protocol {
	out := make(map[uint16]Protocol, len(x.ports))
	for port, p := range x.ports {
		out[port] = p.protocol
	}
	return out
}

// Listener returns the listener that serves a host on a port, or nil. host must be a result of
// NormalizeHost.
func (x *Index) Listener(port uint16, host string) *Listener {
	if li := x.listenerForHost(port, host); li != nil {
		return li.listener
	}
	return nil
}

func (x *Index) listenerForHost(port uint16, host string) (out *listenerIndex) {
	if p := x.ports[port]; p != nil {
		p.listeners.eachMatch(host, func(li *listenerIndex) bool { out = li; return false })
	}
	return out
}

// Certificate returns the key pair for a TLS client that connects to port with this server name, or
// nil. An empty name stands for a client that sends no server name.
func (x *Index) Certificate(port uint16, name string) (pair *tls.Certificate) {
	name = NormalizeHost(name)
	li := x.listenerForHost(port, name)
	if li == nil {
		return nil
	}
	if name != "" {
		li.certs.eachMatch(name, func(c *tls.Certificate) bool { pair = c; return false })
	}
	if pair == nil {
		pair = li.listener.Default
	}
	return pair
}

// Match returns the rule for request r, which arrived on a port. ok is false if no rule matches. If
// a listener serves the host of r, f.Listener is set even then.
func (x *Index) Match(port uint16, r *http.Request) (f Found, ok bool) {
	host := NormalizeHost(r.Host)
	li := x.listenerForHost(port, host)
	if li == nil {
		return Found{}, false
	}
	q := &matchRequest{r: r}
	li.rules.eachMatch(host, func(p *pathIndex) bool {
		if e := p.findEntry(q); e != nil {
			f, ok = Found{Listener: li.listener, Rule: e.rule, Match: e.match}, true
		}
		return !ok
	})
	f.Listener = li.listener
	return f, ok
}

// matchRequest is the request that rules are compared with. It parses the query at most once, when
// a rule needs it.
type matchRequest struct {
	r     *http.Request
	query url.Values
}

func (p *pathIndex) findEntry(q *matchRequest) *entry {
	path := q.r.URL.Path
	if path == "" {
		path = "/"
	}
	if e := firstMatchingEntry(p.exact[path], q); e != nil {
		return e
	}
	if e := firstRegexMatch(p.regex, path, q); e != nil {
		return e
	}
	for at := normalizePrefix(path); ; {
		if e := firstMatchingEntry(p.prefix[at], q); e != nil {
			return e
		}
		if at == "/" {
			return firstRegexMatch(p.lateRegex, path, q)
		}
		at = normalizePrefix(at[:strings.LastIndexByte(at, '/')+1])
	}
}

func firstRegexMatch(list []*entry, path string, q *matchRequest) *entry {
	for _, e := range list {
		if e.path.MatchString(path) && e.matchesBesidesPath(q) {
			return e
		}
	}
	return nil
}

func firstMatchingEntry(list []*entry, q *matchRequest) *entry {
	for _, e := range list {
		if e.matchesBesidesPath(q) {
			return e
		}
	}
	return nil
}

// matchesBesidesPath reports whether request q meets every condition of e except that on the path.
func (e *entry) matchesBesidesPath(q *matchRequest) bool {
	m := e.match
	if m.Method != "" && m.Method != q.r.Method {
		return false
	}
	for i, h := range m.Headers {
		values := q.r.Header.Values(h.Name)
		if len(values) == 0 || !h.matchesValue(strings.Join(values, ","), e.headers[i]) {
			return false
		}
	}
	for i, p := range m.Query {
		if q.query == nil {
			q.query = q.r.URL.Query()
		}
		values := q.query[p.Name]
		if len(values) == 0 || !p.matchesValue(values[0], e.query[i]) {
			return false
		}
	}
	return true
}

func (v ValueMatch) matchesValue(value string, expression *regexp.Regexp) bool {
	if expression != nil {
		return expression.MatchString(value)
	}
	return value == v.Value
}
