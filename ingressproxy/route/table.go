// Package route says what a proxy in front of Services does with a request: a Table is made of Ingresses or of
// Gateways and their routes by a translator, compiled once into an Index, and asked for each request.
// It is pure: no sockets, no clocks, and what is random is an argument.
package route

import (
	"crypto/tls"
	"crypto/x509"
	"net/netip"
	"time"
)

// Table is all that a proxy serves at one moment. Who has made one never changes it afterwards: readers share it.
type Table struct {
	// Listeners with one port share its socket; they then have one Protocol, and the most specific Host decides
	// which of them a request is for.
	Listeners []Listener
	// Pools are the endpoints that backends name, by key. A pool keeps its key from table to table, so that
	// what was learnt of its endpoints is kept too.
	Pools map[string]Pool
}

// Protocol is what a listener speaks with clients.
type Protocol string

const (
	// HTTP is HTTP/1.1, and HTTP/2 for who begins with it (h2c).
	HTTP Protocol = "HTTP"
	// HTTPS is the same in TLS, the version agreed on by ALPN.
	HTTPS Protocol = "HTTPS"
)

// Listener is a port, and the hosts it answers for there.
type Listener struct {
	// Name tells listeners apart in a table: "http", "shop/gateway/https".
	Name     string
	Port     uint16
	Protocol Protocol
	// Host bounds which requests are for this listener; the zero value is every host.
	Host Host
	// Certificates are offered by the name that a client asks for (SNI), the most specific Host first, among equals
	// the earlier; a listener of HTTPS without any fails every handshake.
	Certificates []Certificate
	// Default is offered to clients that ask for no name or one that no certificate is for; nil: they are refused.
	Default *tls.Certificate
	// Rules are asked by the most specific host, path, method, headers and query, as Gateway API orders them;
	// among equals the earlier wins. A translator puts older routes first, then those earlier in the alphabet.
	Rules []Rule
}

// Certificate is a key pair and the names for which it is offered.
type Certificate struct {
	Hosts []Host
	Pair  *tls.Certificate
}

// Rule is what happens to requests of Hosts that one of Matches is true of.
type Rule struct {
	// Name is whose rule it is, for logs and metrics: "ingress/shop/web", "httproute/shop/web/0".
	Name string
	// Hosts: none is every host that the listener answers for.
	Hosts []Host
	// Matches: none is every request. Each counts by itself in the order of rules.
	Matches  []Match
	Filters  Filters
	Backends []Backend
	Timeouts Timeouts
	// Answer is given instead of asking a backend, unless Filters redirect; 0: none.
	Answer int
}

// Timeouts of 0 are none.
type Timeouts struct {
	// Request is from the request's header to the end of the answer; Backend is for each try at an endpoint.
	Request, Backend time.Duration
}

// PathKind says how PathMatch.Value is compared.
type PathKind uint8

const (
	// Prefix compares whole elements: /a is a prefix of /a, /a/ and /a/b, and not of /ab. The zero PathMatch is every path.
	Prefix PathKind = iota
	Exact
	// Regex is an RE2 expression for the whole path. It comes after Exact and before Prefix, longer ones first.
	Regex
	// LateRegex is such an expression that comes after Prefix, longer ones first.
	LateRegex
)

// PathMatch is asked of the decoded path.
type PathMatch struct {
	Kind  PathKind
	Value string
}

// ValueMatch is true of a header or query parameter that is there and has that value; an expression (RE2) is for the whole value.
// Of a query parameter the first value counts, of a header all of them joined by commas.
type ValueMatch struct {
	Name  string
	Value string
	Regex bool
}

// Match is true where all that it says is.
type Match struct {
	Path PathMatch
	// Method is in capitals; "": any.
	Method  string
	Headers []ValueMatch
	Query   []ValueMatch
}

// Backend is where a share of a rule's requests goes, by Weight among the weights of all; a rule whose weights are all 0 answers 500.
type Backend struct {
	// Pool is a key of Table.Pools. A pool without endpoints answers 503.
	Pool   string
	Weight uint32
	// Filters are applied after those of the rule. Redirects and mirrors work here too.
	Filters Filters
	// Answer is given for this share instead of asking Pool; 0: none. Gateway API wants 500 for references to nothing.
	Answer int
}

// BackendProtocol is what endpoints of a pool speak.
type BackendProtocol string

const (
	// HTTP1 is HTTP/1.1, with upgrades. The zero value is the same.
	HTTP1 BackendProtocol = "http"
	// H2C is HTTP/2 without TLS, as gRPC servers speak it.
	H2C BackendProtocol = "h2c"
	// TLS is HTTP/2 or HTTP/1.1 in TLS, by ALPN.
	TLS BackendProtocol = "https"
)

// Pool is a set of endpoints that are as good as each other.
type Pool struct {
	Protocol  BackendProtocol
	Endpoints []netip.AddrPort
	// Verify says whom to expect behind TLS; nil: whoever answers.
	Verify *Verify
	// ByClient sends one client's requests to one endpoint while the endpoints stay the same.
	ByClient bool
}

// Verify is how an endpoint's certificate is judged: for ServerName, which is also asked for, by Roots (nil: the system's).
type Verify struct {
	ServerName string
	Roots      *x509.CertPool
}

// Filters change requests and answers on their way.
type Filters struct {
	Request, Response Headers
	Redirect          *Redirect
	Rewrite           *Rewrite
	Mirrors           []Mirror
}

// Header is one header's name and value.
type Header struct{ Name, Value string }

// Headers are applied in this order: removed, set, added.
type Headers struct {
	Remove []string
	Set    []Header
	Add    []Header
}

// Redirect is an answer that sends the client elsewhere: what is empty stays as the client asked for it.
type Redirect struct {
	Scheme string
	Host   string
	// Port 0: the scheme's own when Scheme is given, or else the listener's.
	Port uint16
	Path *PathChange
	// Status 0: 302.
	Status int
}

// Rewrite changes what the backend is asked for.
type Rewrite struct {
	Host string
	Path *PathChange
}

// PathChange replaces the whole path, or the prefix that the rule's match has found.
type PathChange struct {
	Value  string
	Prefix bool
}

// Mirror sends a copy of requests to a pool whose answers are thrown away: Numerator of Denominator of them; a denominator of 0 is all.
type Mirror struct {
	Pool                   string
	Numerator, Denominator uint32
}
