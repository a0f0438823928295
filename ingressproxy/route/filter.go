package route

import (
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// ChooseBackend returns one of the backends. Each is chosen with a probability proportional to its
// weight if n is a uniformly random number. ok is false if the sum of the weights is 0.
func ChooseBackend(backends []Backend, n uint64) (b *Backend, ok bool) {
	var total uint64
	for i := range backends {
		total += uint64(backends[i].Weight)
	}
	if total == 0 {
		return nil, false
	}
	n %= total
	for i := range backends {
		if weight := uint64(backends[i].Weight); n >= weight {
			n -= weight
			continue
		}
		return &backends[i], true
	}
	return nil, false
}

// Samples reports whether a request is mirrored. It returns true for the fraction of requests that
// m specifies if n is a uniformly random number.
func (m Mirror) Samples(n uint64) bool {
	return m.Denominator == 0 || n%uint64(m.Denominator) < uint64(m.Numerator)
}

// ModifyHeader removes, sets, and adds fields of header as h specifies, in this order.
func (h Headers) ModifyHeader(header http.Header) {
	for _, name := range h.Remove {
		header.Del(name)
	}
	for _, s := range h.Set {
		header.Set(s.Name, s.Value)
	}
	for _, a := range h.Add {
		header.Add(a.Name, a.Value)
	}
}

// Location returns the URL to which d redirects request r, for header field Location. Parts that d
// does not set are those of r. scheme and port are those of the listener that received r. prefix is
// the path prefix that the rule matched (Found.Prefix); d may replace it.
func (d *Redirect) Location(r *http.Request, scheme string, port uint16, prefix string) string {
	u := url.URL{Scheme: scheme, RawQuery: r.URL.RawQuery, Path: r.URL.Path, RawPath: r.URL.RawPath}
	if d.Scheme != "" {
		u.Scheme = d.Scheme
	}
	switch {
	case d.Port != 0:
		port = d.Port
	case d.Scheme != "":
		port = defaultPort(d.Scheme)
	}
	host := d.Host
	if host == "" {
		host = NormalizeHost(r.Host)
	}
	if port != 0 && port != defaultPort(u.Scheme) {
		u.Host = net.JoinHostPort(host, strconv.Itoa(int(port)))
	} else if strings.Contains(host, ":") {
		u.Host = "[" + host + "]"
	} else {
		u.Host = host
	}
	d.Path.RewritePath(&u, prefix)
	return u.String()
}

func defaultPort(scheme string) uint16 {
	switch scheme {
	case "http":
		return 80
	case "https":
		return 443
	}
	return 0
}

// StatusCode returns the status code of the redirect; the default is 302.
func (d *Redirect) StatusCode() int {
	if d.Status == 0 {
		return http.StatusFound
	}
	return d.Status
}

// RewritePath replaces the path of URL u as c specifies. If c.Prefix is set, it replaces only
// prefix, the leading part that the rule matched, and the rest keeps its percent-encoding. A nil c
// changes nothing.
func (c *PathChange) RewritePath(u *url.URL, prefix string) {
	if c == nil {
		return
	}
	path := c.Value
	if c.Prefix {
		rest := pathAfterPrefix(u.EscapedPath(), prefix)
		path = strings.TrimRight((&url.URL{Path: c.Value}).EscapedPath(), "/")
		if rest != "" {
			path += "/" + strings.TrimPrefix(rest, "/")
		}
		if path == "" {
			path = "/"
		}
		if decoded, err := url.PathUnescape(path); err == nil {
			u.Path, u.RawPath = decoded, path
		}
		return
	}
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	u.Path, u.RawPath = path, ""
}

// pathAfterPrefix returns the part of a percent-encoded path that follows prefix. prefix is not
// percent-encoded, and the decoded path must start with it.
func pathAfterPrefix(escaped, prefix string) string {
	for n := len(strings.TrimRight(prefix, "/")); n > 0 && escaped != ""; n-- {
		width := 1
		if escaped[0] == '%' {
			width = min(3, len(escaped))
		}
		escaped = escaped[width:]
	}
	return escaped
}
