package apiserver_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"runtime"
	"runtime/debug"
	runtimemetrics "runtime/metrics"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/gcheadroom"
)

// A connection that exceeds the limits of frames restrains the garbage of the process.
func TestFloodRestrainsGarbage(t *testing.T) {
	t.Setenv("GOGC", "")
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	heap := make([]byte, 128<<20) // of which a restraint allows less than the usual 100 % as garbage
	r := apiservertest.StartReplica(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		gcheadroom.Run(ctx, gcheadroom.ServerHeadroom, nil)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	limit := []runtimemetrics.Sample{{Name: "/gc/gogc:percent"}}
	r.OK(r.Call(r.SameAdmin(), "GET", oneMap, ""))
	runtime.GC()
	if runtimemetrics.Read(limit); limit[0].Value.Uint64() < 100 {
		t.Fatalf("before the flood, the limit is %d %%", limit[0].Value.Uint64())
	}
	conf := &tls.Config{RootCAs: r.Trust.Pool(), ServerName: "127.0.0.1", NextProtos: []string{"h2"}}
	c, err := tls.Dial("tcp", r.Addr, conf)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(apiservertest.Far)); err != nil {
		t.Fatal(err)
	}
	resets, sent := frameFloods(t)[0].frames, make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = c.Write(resets)
	}()
	if !readUntilAway(c, new(atomic.Int64)) {
		t.Fatal("the server did not end the connection")
	}
	c.Close()
	<-sent
	apiservertest.Eventually(t, func() error {
		if runtimemetrics.Read(limit); limit[0].Value.Uint64() >= 100 {
			return fmt.Errorf("the limit is %d %%", limit[0].Value.Uint64())
		}
		return nil
	})
	runtime.KeepAlive(heap)
}
