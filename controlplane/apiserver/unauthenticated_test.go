package apiserver_test

import (
	"crypto/tls"
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/memory/memtest"
)

// A stranger announces a frame and sends nothing of it: no room is made for what has not come.
func TestAnnouncedFrames(t *testing.T) {
	const strangers = 100
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Serving.Connections = connlimit.Limits{Unauthenticated: 2 * strangers,
			UnauthenticatedPerSource: 2 * strangers}
	})
	before := memtest.LiveHeap()
	var all []net.Conn
	for range strangers {
		c, err := tls.Dial("tcp", r.Addr, &tls.Config{RootCAs: r.Trust.Pool(), ServerName: "127.0.0.1",
			NextProtos: []string{"h2"}})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		all = append(all, c)
		if err := c.SetDeadline(time.Now().Add(apiservertest.Far)); err != nil {
			t.Fatal(err)
		}
		const head = "\x10\x00\x00\x00\x00\x00\x00\x00\x01" // DATA of a megabyte
		frames := http2.NewFramer(c, c)
		if _, err := c.Write([]byte(http2.ClientPreface)); err != nil {
			t.Fatal(err)
		}
		if err := frames.WriteSettings(); err != nil {
			t.Fatal(err)
		}
		first, err := frames.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if most, _ := first.(*http2.SettingsFrame).Value(http2.SettingMaxFrameSize); most != 16<<10 {
			t.Errorf("frames may have %d bytes", most)
		}
		if _, err := c.Write([]byte(head)); err != nil {
			t.Fatal(err)
		}
		// It answers a ping that came before, and a frame that is too large ends the connection:
		// either way it was read.
		for {
			if f, err := frames.ReadFrame(); err != nil {
				break
			} else if _, ok := f.(*http2.GoAwayFrame); ok {
				break
			}
		}
	}
	if grown := memtest.LiveHeap() - before; grown > strangers*128<<10 {
		t.Errorf("%d strangers, each with nine bytes of a frame, take %d KiB", strangers, grown>>10)
	}
	runtime.KeepAlive(all)
}

// How many strangers there may be follows the memory limit, unless somebody says otherwise.
func TestUnauthenticatedLimitFollowsMemoryLimit(t *testing.T) {
	few, many := apiserver.Config{Serving: apiserver.ServingConfig{MemoryLimit: 256 << 20}},
		apiserver.Config{Serving: apiserver.ServingConfig{MemoryLimit: 8 << 30}}
	set := apiserver.Config{Serving: apiserver.ServingConfig{Connections: connlimit.Limits{Unauthenticated: 7}}}
	few.SetDefaults()
	many.SetDefaults()
	set.SetDefaults()
	if few.Serving.Connections.Unauthenticated != 128 || set.Serving.Connections.Unauthenticated != 7 ||
		many.Serving.Connections.Unauthenticated != min(4096, connlimit.OpenFilesShare(1, 4)) {
		t.Errorf("%d, %d and %d strangers", few.Serving.Connections.Unauthenticated,
			many.Serving.Connections.Unauthenticated, set.Serving.Connections.Unauthenticated)
	}
}
