package serve

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"

	"golang.org/x/net/http2"

	"keelson.dev/keelson/internal/framelimit"
)

// protoUnencryptedHTTP2 is net/http's key in Server.TLSNextProto for HTTP/2 without TLS. After it
// has read the preface, net/http passes such a connection as a *tls.Conn. Its NetConn has a method
// UnencryptedNetConn.
const protoUnencryptedHTTP2 = "unencrypted_http2"

// limitResets limits the rate of stream resets on the HTTP/2 connections of srv, with and without
// TLS. It replaces net/http's HTTP/2, which does not accept wrapped connections, by
// golang.org/x/net, which has the same code. Only resets are limited: fast downloads need many
// window updates, and the server itself limits streams and queued responses.
func limitResets(srv *http.Server, resets int) error {
	h2 := &http2.Server{}
	if err := http2.ConfigureServer(srv, h2); err != nil {
		return fmt.Errorf("configuring HTTP/2: %w", err)
	}
	limits := framelimit.Limits{AuthenticatedResets: float64(resets)}
	known := func() bool { return true }
	srv.TLSNextProto[http2.NextProtoTLS] = func(hs *http.Server, c *tls.Conn, h http.Handler) {
		h2.ServeConn(framelimit.New(c, known, limits), serveOptions(hs, h))
	}
	srv.TLSNextProto[protoUnencryptedHTTP2] = func(hs *http.Server, c *tls.Conn, h http.Handler) {
		inner, ok := c.NetConn().(interface{ UnencryptedNetConn() net.Conn })
		if !ok {
			return // net/http closes the connection
		}
		opts := serveOptions(hs, h)
		opts.SawClientPreface = true
		h2.ServeConn(framelimit.NewWithoutTLS(inner.UnencryptedNetConn(), known, limits), opts)
	}
	return nil
}

// serveOptions returns the options with which golang.org/x/net serves a connection of hs with
// handler h.
func serveOptions(hs *http.Server, h http.Handler) *http2.ServeConnOpts {
	ctx := context.Background()
	if base, ok := h.(interface{ BaseContext() context.Context }); ok { // undocumented contract between net/http and golang.org/x/net
		ctx = base.BaseContext()
	}
	return &http2.ServeConnOpts{Context: ctx, Handler: h, BaseConfig: hs}
}
