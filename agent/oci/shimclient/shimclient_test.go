package shimclient

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"keelson.dev/keelson/agent/oci/wire"
)

// scriptedShim answers Hello and the first request after it, reports an exited container, and closes
// the connection.
func scriptedShim(t *testing.T, l net.Listener) {
	c, err := l.Accept()
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	var buf []byte
	chunk := make([]byte, 4096)
	for requests := 0; requests < 2; {
		n, err := c.Read(chunk)
		if err != nil {
			t.Error(err)
			return
		}
		buf = append(buf, chunk[:n]...)
		frame, used, err := wire.NextFrame(buf)
		if err != nil {
			t.Error(err)
			return
		}
		if used == 0 {
			continue
		}
		buf = buf[used:]
		requests++
		reply := wire.Frame{ID: frame.ID, Kind: wire.KindWelcome,
			Body: wire.Marshal(1, &wire.Welcome{Version: 1, Snapshot: wire.Snapshot{PausePID: 7}})}
		if frame.Kind != wire.KindHello {
			reply.Kind, reply.Body = wire.KindDone, wire.Marshal(1, &wire.Done{Error: "no such container"})
		}
		if _, err := c.Write(wire.AppendFrame(nil, reply)); err != nil {
			t.Error(err)
			return
		}
	}
	exited := wire.Frame{Kind: wire.KindExited, Body: wire.Marshal(1, &wire.Exited{Container: "c", Code: 3})}
	if _, err := c.Write(wire.AppendFrame(nil, exited)); err != nil {
		t.Error(err)
	}
}

// A client gets the shim's snapshot, the errors of its requests, and the ends of processes. Requests
// fail after the connection has ended.
func TestClient(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	file, err := Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.FileListener(file)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go scriptedShim(t, l)
	exits, gone := make(chan wire.Exited, 1), make(chan struct{})
	c, snapshot, err := Connect(ctx, dir, func(e wire.Exited) { exits <- e }, func() { close(gone) })
	if err != nil {
		t.Fatal(err)
	}
	if snapshot.PausePID != 7 {
		t.Errorf("snapshot: %+v", snapshot)
	}
	if _, err := c.CallDone(ctx, wire.KindForget, &wire.Target{Container: "c"}); err == nil ||
		err.Error() != "no such container" {
		t.Errorf("a request that fails: %v", err)
	}
	if n := c.OpenRequests(); n != 0 {
		t.Errorf("%d requests wait after their responses", n)
	}
	select {
	case e := <-exits:
		if e.Container != "c" || e.Code != 3 {
			t.Errorf("the end of a container: %+v", e)
		}
	case <-ctx.Done():
		t.Fatal("the end of a container was not reported")
	}
	select {
	case <-gone:
	case <-ctx.Done():
		t.Fatal("the end of the connection was not reported")
	}
	if _, err := c.CallDone(ctx, wire.KindForget, &wire.Target{Container: "c"}); !errors.Is(err, ErrDisconnected) {
		t.Errorf("a request after the end: %v", err)
	}
}

// A socket without a shim refuses connections.
func TestConnectWithoutShim(t *testing.T) {
	dir := t.TempDir()
	file, err := Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Connect(t.Context(), dir, nil, nil); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("connected to nothing: %v", err)
	}
}
