package apiserver_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/memory/memtest"
)

// frameFlood is the bytes of a hostile connection: first a greeting, then the frames of many
// streams.
type frameFlood struct {
	name   string
	frames []byte
	away   bool // the server has to answer with GOAWAY
}

// frameFloods returns floods that need no credentials. All connections send the same bytes.
func frameFloods(t *testing.T) []frameFlood {
	t.Helper()
	build := func(settings []http2.Setting, f func(fr *http2.Framer, header func(extra int) []byte) error) []byte {
		var out, block bytes.Buffer
		out.WriteString(http2.ClientPreface)
		fr := http2.NewFramer(&out, nil)
		enc := hpack.NewEncoder(&block)
		header := func(extra int) []byte {
			block.Reset()
			for _, h := range [][2]string{{":method", "POST"}, {":scheme", "https"}, {":authority", "a"},
				{":path", oneMap}} {
				_ = enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
			}
			for range extra { // one byte each once they are in the table
				_ = enc.WriteField(hpack.HeaderField{Name: "x", Value: "y"})
			}
			return bytes.Clone(block.Bytes())
		}
		if err := errors.Join(fr.WriteSettings(settings...), f(fr, header)); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	open := func(fr *http2.Framer, i int, block []byte) error {
		return fr.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1), BlockFragment: block,
			EndHeaders: true})
	}
	reset := build(nil, func(fr *http2.Framer, header func(int) []byte) (err error) {
		for i := 0; i < 5000 && err == nil; i++ {
			err = errors.Join(open(fr, i, header(0)), fr.WriteRSTStream(uint32(2*i+1), http2.ErrCodeCancel))
		}
		return err
	})
	// Answers cannot be sent, so that streams end when the server says so.
	headers := build([]http2.Setting{{ID: http2.SettingInitialWindowSize, Val: 0}},
		func(fr *http2.Framer, header func(int) []byte) (err error) {
			for i := 0; i < 240 && err == nil; i++ {
				err = open(fr, i, header(1400))
			}
			return err
		})
	resetHeaders := build(nil, func(fr *http2.Framer, header func(int) []byte) (err error) {
		for i := 0; i < 2000 && err == nil; i++ {
			err = errors.Join(open(fr, i, header(1400)), fr.WriteRSTStream(uint32(2*i+1), http2.ErrCodeCancel))
		}
		return err
	})
	pings := build(nil, func(fr *http2.Framer, _ func(int) []byte) (err error) {
		for i := 0; i < 20000 && err == nil; i++ {
			err = fr.WritePing(false, [8]byte{})
		}
		return err
	})
	endless := build(nil, func(fr *http2.Framer, header func(int) []byte) error {
		err := fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: header(1400)})
		for i := 0; i < 3000 && err == nil; i++ {
			err = fr.WriteContinuation(1, false, bytes.Repeat([]byte{0xbe}, 1000))
		}
		return err
	})
	return []frameFlood{{"rapid reset", reset, true}, {"many headers", headers, true},
		{"rapid reset of many headers", resetHeaders, true},
		{"pings", pings, true}, {"endless headers", endless, false}}
}

// 400 connections without credentials that flood a replica by HTTP/2 add less than 128 MiB to its memory, are sent
// away, and keep no administrator waiting. The clients' own connections count as well.
func TestFloodsOfFrames(t *testing.T) {
	const connections, most = 400, 128 << 20
	defer debug.SetGCPercent(debug.SetGCPercent(50))
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Serving.Connections = connlimit.Limits{Unauthenticated: 2 * connections,
			UnauthenticatedPerSource: 2 * connections}
	})
	admin := r.SameAdmin()
	for _, f := range frameFloods(t) {
		t.Run(f.name, func(t *testing.T) {
			var all []*tls.Conn
			for range connections {
				c, err := tls.Dial("tcp", r.Addr, &tls.Config{RootCAs: r.Trust.Pool(), ServerName: "127.0.0.1",
					NextProtos: []string{"h2"}})
				if err != nil {
					t.Fatal(err)
				}
				if err := c.SetDeadline(time.Now().Add(apiservertest.Far)); err != nil {
					t.Fatal(err)
				}
				all = append(all, c)
			}
			before := memtest.LiveHeap()
			var away, goAway atomic.Int64 // connections that the server ended, and those that received why
			var clients sync.WaitGroup
			began := time.Now()
			for _, c := range all {
				clients.Go(func() { _, _ = c.Write(f.frames) })
				clients.Go(func() {
					if readUntilAway(c, &goAway) {
						away.Add(1)
					}
				})
			}
			done := make(chan struct{})
			go func() { clients.Wait(); close(done) }()
			peak, slowest := int64(0), time.Duration(0)
			for ended := false; !ended; {
				select {
				case <-done:
					ended = true
				case <-time.After(100 * time.Millisecond):
				}
				asked := time.Now()
				r.OK(r.Call(admin, "GET", oneMap, ""))
				slowest = max(slowest, time.Since(asked))
				peak = max(peak, memtest.LiveHeap()-before)
			}
			for _, c := range all {
				c.Close()
			}
			t.Logf("%d connections: %d MiB more at most, %d sent away, %d with GOAWAY, %v; an administrator "+
				"waited for %v at most",
				connections, peak>>20, away.Load(), goAway.Load(), time.Since(began).Round(time.Millisecond), slowest)
			if peak > most && !apiservertest.Instrumented {
				t.Errorf("%d MiB more", peak>>20)
			}
			if f.away && (away.Load() < connections || goAway.Load() == 0) {
				t.Errorf("%d of %d connections were sent away, %d with GOAWAY", away.Load(), connections, goAway.Load())
			}
		})
	}
}

// readUntilAway reads what the server sends until the connection ends, and reports whether the
// server ended it. It counts a GOAWAY, which is lost if the kernel resets the connection because of
// frames that the server does not read.
func readUntilAway(c net.Conn, goAway *atomic.Int64) bool {
	head := make([]byte, 9)
	for {
		if _, err := io.ReadFull(c, head); err != nil {
			return !errors.Is(err, os.ErrDeadlineExceeded)
		}
		if _, err := io.CopyN(io.Discard, c, int64(head[0])<<16|int64(head[1])<<8|int64(head[2])); err != nil {
			return !errors.Is(err, os.ErrDeadlineExceeded)
		}
		if http2.FrameType(head[3]) == http2.FrameGoAway {
			goAway.Add(1)
		}
	}
}

// An authenticated client may reset as many streams as real programs do.
func TestKnownClientsMayResetStreams(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	cert := r.Cert(pki.Client("admin", api.GroupMasters))
	c, err := tls.Dial("tcp", r.Addr, &tls.Config{RootCAs: r.Trust.Pool(), ServerName: "127.0.0.1",
		NextProtos:   []string{"h2"},
		Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(apiservertest.Far)); err != nil {
		t.Fatal(err)
	}
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	fr := http2.NewFramer(c, c)
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := fr.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	request := func(id uint32) {
		t.Helper()
		block.Reset()
		for _, h := range []string{":method GET", ":scheme https", ":authority a", ":path " + oneMap} {
			name, value, _ := strings.Cut(h, " ")
			_ = enc.WriteField(hpack.HeaderField{Name: name, Value: value})
		}
		if err := fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndHeaders: true,
			EndStream: true}); err != nil {
			t.Fatal(err)
		}
	}
	answered := func(id uint32) {
		t.Helper()
		for {
			f, err := fr.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			switch f := f.(type) {
			case *http2.GoAwayFrame:
				t.Fatalf("sent away: %v", f.ErrCode)
			case *http2.MetaHeadersFrame:
				if f.StreamID == id {
					return
				}
			}
		}
	}
	request(1)
	answered(1)
	id := uint32(3)
	for range 1000 {
		request(id)
		if err := fr.WriteRSTStream(id, http2.ErrCodeCancel); err != nil {
			t.Fatal(err)
		}
		id += 2
	}
	request(id)
	answered(id)
}
