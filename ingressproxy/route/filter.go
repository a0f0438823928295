package route

import (
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Choose picks a backend by weight; n is any number, evenly random. ok is false when all weights are 0.
func Choose(backends []Backend, n uint64) (b *Backend, ok bool) {
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

// Chosen says whether a request is mirrored; n is any number, evenly random.
func (m Mirror) Chosen(n uint64) bool {
	return m.Denominator == 0 || n%uint64(m.Denominator) < uint64(m.Numerator)
}

// Apply changes a header.
func (h Headers) Apply(to http.Header) {
	for _, name := range h.Remove {
		to.Del(name)
	}
	for _, s := range h.Set {
		to.Set(s.Name, s.Value)
	}
	for _, a := range h.Add {
		to.Add(a.Name, a.Value)
	}
}

// Location is where a redirect sends a request that came to a port by scheme; prefix is Found.Prefix.
func (d *Redirect) Location(r *http.Request, scheme string, port uint16, prefix string) string {
	u := url.URL{Scheme: scheme, RawQuery: r.URL.RawQuery, Path: r.URL.Path, RawPath: r.URL.RawPath}
	if d.Scheme != "" {
		u.Scheme = d.Scheme
	}
	switch {
	case d.Port != 0:
		port = d.Port
	case d.Scheme != "":
		port = wellKnown(d.Scheme)
	}
	host := d.Host
	if host == "" {
		host = HostOf(r.Host)
	}
	if port != 0 && port != wellKnown(u.Scheme) {
		u.Host = net.JoinHostPort(host, strconv.Itoa(int(port)))
	} else if strings.Contains(host, ":") {
		u.Host = "[" + host + "]"
	} else {
		u.Host = host
	}
	d.Path.Apply(&u, prefix)
	return u.String()
}

func wellKnown(scheme string) uint16 {
	switch scheme {
	case "http":
		return 80
	case "https":
		return 443
	}
	return 0
}

// Code is the redirect's status.
func (d *Redirect) Code() int {
	if d.Status == 0 {
		return http.StatusFound
	}
	return d.Status
}

// Apply changes a URL's path; nil changes nothing. What of the path stays keeps its escapes.
func (c *PathChange) Apply(u *url.URL, prefix string) {
	if c == nil {
		return
	}
	path := c.Value
	if c.Prefix {
		rest := after(u.EscapedPath(), prefix)
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

// after is what of an escaped path follows a decoded prefix.
func after(escaped, prefix string) string {
	for n := len(strings.TrimRight(prefix, "/")); n > 0 && escaped != ""; n-- {
		width := 1
		if escaped[0] == '%' {
			width = min(3, len(escaped))
		}
		escaped = escaped[width:]
	}
	return escaped
}
