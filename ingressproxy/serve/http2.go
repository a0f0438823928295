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

// protoUnencryptedHTTP2 is net/http's key in Server.TLSNextProto for HTTP/2 without TLS. After
// net/http has read the preface, it passes such a connection as a *tls.Conn. The value that its
// method NetConn returns has a method UnencryptedNetConn, which returns the connection.
const protoUnencryptedHTTP2 = "unencrypted_http2"

// limitResets limits the stream resets of each HTTP/2 connection of srv, with and without TLS. A
// client may reset a burst of resets streams, and a tenth of that number per second afterwards.
// Beyond the limit the connection is closed. For this, limitResets replaces the HTTP/2 server of
// net/http, which does not accept wrapped connections, by that of golang.org/x/net, which is the
// same code. Other frames are not limited: fast downloads need many window updates, and the server
// itself limits streams and queued responses.
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
	if base, ok := h.(interface{ BaseContext() context.Context }); ok {
		// undocumented contract between net/http and golang.org/x/net
		ctx = base.BaseContext()
	}
	return &http2.ServeConnOpts{Context: ctx, Handler: h, BaseConfig: hs}
}
