// Package route decides how a proxy handles a request. Packages ingress and gateway translate API
// objects to a Table. Compile turns the Table into an Index, in which the proxy looks up each
// request. The package does no I/O and reads no clock; random numbers are arguments.
package route

import (
	"crypto/tls"
	"crypto/x509"
	"net/netip"
	"time"
)

// Table contains all listeners, rules and endpoints that a proxy serves at one time. A Table must
// not be modified after it was built, because several goroutines read it.
type Table struct {
	// Listeners with the same port share its socket and must have the same Protocol. A request is
	// handled by the listener with the most specific matching Host.
	Listeners []Listener
	// Pools are the endpoints of backends, by the key that Backend.Pool names. A pool must have the
	// same key in successive tables: the proxy then keeps the failure state of its endpoints.
	Pools map[string]Pool
}

// Protocol is the protocol between clients and a listener.
type Protocol string

const (
	// HTTP is HTTP/1.1, or HTTP/2 for clients that start with its preface (h2c).
	HTTP Protocol = "HTTP"
	// HTTPS is HTTP/1.1 or HTTP/2 over TLS, negotiated by ALPN.
	HTTPS Protocol = "HTTPS"
)

// Listener is a port and the hosts that are served on it.
type Listener struct {
	// Name identifies the listener in a table, for example "http" or "shop/gateway/https".
	Name     string
	Port     uint16
	Protocol Protocol
	// Host restricts the listener to requests for this host; the zero value means every host.
	Host Host
	// Certificates are the key pairs for TLS clients. The client's server name (SNI) selects the
	// certificate with the most specific Host, then the earlier certificate. An HTTPS listener
	// without Certificates and Default fails every handshake.
	Certificates []Certificate
	// Default is the key pair for clients without a server name, and for server names without a
	// certificate. If it is nil, the handshakes of these clients fail.
	Default *tls.Certificate
	// Rules are evaluated in the order of specificity that the Gateway API defines: host, path,
	// method, headers, query. Among equal rules, the earlier rule is used. Packages that build a
	// table list rules of older routes first, then in alphabetical order.
	Rules []Rule
}

// Certificate is a TLS key pair and the hosts for which it is used.
type Certificate struct {
	Hosts []Host
	Pair  *tls.Certificate
}

// Rule defines how a request is handled that has one of Hosts and meets one of Matches.
type Rule struct {
	// Name identifies the object of the rule in logs and metrics, for example "ingress/shop/web" or
	// "httproute/shop/web/0".
	Name string
	// Hosts are the hosts of the rule; empty means every host of the listener.
	Hosts []Host
	// Matches are alternatives. Each is ordered separately among the matches of all rules. Empty
	// means every request.
	Matches  []Match
	Filters  Filters
	Backends []Backend
	Timeouts Timeouts
	// Answer is the status code of a response without contacting a backend; 0 means that a backend
	// is contacted. A redirect in Filters has precedence.
	Answer int
}

// Timeouts are time limits for a request; 0 means no limit.
type Timeouts struct {
	// Request is the limit from the request header to the end of the response. Backend is the limit
	// for each attempt at an endpoint.
	Request, Backend time.Duration
}

// PathKind defines how a request path is compared with the value of a PathMatch.
type PathKind uint8

const (
	// Prefix compares whole path elements: /a is a prefix of /a, /a/, and /a/b, but not of /ab. The
	// zero PathMatch matches every path.
	Prefix PathKind = iota
	Exact
	// Regex is an RE2 expression for the whole path. It is tried after Exact and before Prefix,
	// longer expressions first.
	Regex
	// LateRegex is an RE2 expression for the whole path that is tried after Prefix, longer
	// expressions first.
	LateRegex
)

// PathMatch is a condition on the path of a request after percent-decoding.
type PathMatch struct {
	Kind  PathKind
	Value string
}

// ValueMatch is the condition that a header or query parameter is present and has a value. A
// regular expression (RE2) must match the whole value. Of a query parameter, the first value is
// compared; of a header, all values joined by commas.
type ValueMatch struct {
	Name  string
	Value string
	Regex bool
}

// Match is a set of conditions. A request must meet all of them.
type Match struct {
	Path PathMatch
	// Method is in upper case; "" matches any method.
	Method  string
	Headers []ValueMatch
	Query   []ValueMatch
}

// Backend receives a share of the requests of a rule: its Weight divided by the sum of all weights
// of the rule. If all weights are 0, the requests get status 500.
type Backend struct {
	// Pool is a key of Table.Pools. Requests for a pool without endpoints get status 503.
	Pool   string
	Weight uint32
	// Filters apply to requests for this backend, after the filters of the rule. They may also
	// redirect and mirror.
	Filters Filters
	// Answer is the status code of a response to this share without contacting Pool; 0 means that
	// Pool is contacted. Gateway API requires 500 for a reference to an object that does not exist.
	Answer int
}

// BackendProtocol is the protocol of the endpoints of a pool.
type BackendProtocol string

const (
	// HTTP1 is HTTP/1.1, including upgrades. The zero value means the same.
	HTTP1 BackendProtocol = "http"
	// H2C is HTTP/2 without TLS, as gRPC servers use it.
	H2C BackendProtocol = "h2c"
	// TLS is HTTP/2 or HTTP/1.1 over TLS, negotiated by ALPN.
	TLS BackendProtocol = "https"
)

// Pool is a set of interchangeable endpoints, usually those of a Service port.
type Pool struct {
	Protocol  BackendProtocol
	Endpoints []netip.AddrPort
	// Verify defines how the certificates of TLS endpoints are verified; nil disables verification.
	Verify *Verify
	// ByClient sends all requests of a client to one endpoint while the set of endpoints does not
	// change.
	ByClient bool
}

// Verify defines how the certificate of an endpoint is verified. The certificate must be valid for
// ServerName, which is also sent as SNI, and be issued by one of Roots. nil Roots mean the system's
// roots.
type Verify struct {
	ServerName string
	Roots      *x509.CertPool
}

// Filters modify, redirect, or mirror a request, and modify its response.
type Filters struct {
	Request, Response Headers
	Redirect          *Redirect
	Rewrite           *Rewrite
	Mirrors           []Mirror
}

// Header is the name and value of a header field.
type Header struct{ Name, Value string }

// Headers are changes of header fields, applied in the order Remove, Set, Add.
type Headers struct {
	Remove []string
	Set    []Header
	Add    []Header
}

// Redirect is a redirect response. An empty field keeps that part of the request's URL.
type Redirect struct {
	Scheme string
	Host   string
	// Port 0 means the default port of Scheme, or the port of the listener if Scheme is empty.
	Port uint16
	Path *PathChange
	// Status 0 means 302.
	Status int
}

// Rewrite changes the host and path of the request to the backend.
type Rewrite struct {
	Host string
	Path *PathChange
}

// PathChange replaces the whole path or, if Prefix is set, the prefix that the rule has matched.
type PathChange struct {
	Value  string
	Prefix bool
}

// Mirror sends copies of requests to a pool and discards the responses. Numerator/Denominator is
// the mirrored fraction; a Denominator of 0 means all requests.
type Mirror struct {
	Pool                   string
	Numerator, Denominator uint32
}
