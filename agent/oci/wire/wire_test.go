package wire

import (
	"bytes"
	"errors"
	"reflect"
	"testing"
)

type message interface {
	Marshal() []byte
	Unmarshal([]byte) error
}

func samples() []message {
	return []message{
		&Pause{Root: "/r", Program: "/p", NetNS: "/n", NewIPC: true, NewPID: true, Hostname: "h", Sysctls: []string{"a=1", ""}},
		&Create{Container: "c", OCI: "o", Bundle: "b", Log: "l", LogSize: 1 << 40, LogFiles: 5, ExitFile: "e", OOMFile: "m", TTY: true, Stdin: true, StdinOnce: true},
		&Start{Container: "c", Fifo: "f"},
		&Signal{Container: "c", Exec: 1<<32 - 1, Signal: 15},
		&Exec{Container: "c", OCI: "o", Bundle: "b", TTY: true},
		&Attach{Container: "c", Stdin: true, Stderr: true},
		&Resize{Container: "c", Width: 80, Height: 24},
		&Target{Container: "c"},
		&Done{Error: "no", Time: -1},
		&Started{Error: "e", PID: 7, Result: "{}"},
		&Exited{Container: "c", Code: 137, Time: 1 << 62, OOM: true},
		&Snapshot{PausePID: 3, PauseEnded: true, Containers: []Status{{Container: "c", State: StateExited, PID: 9, Started: 5, Exit: Exited{Code: 1}}, {Container: "d"}}},
	}
}

func TestMessagesSurviveTheWire(t *testing.T) {
	for _, m := range samples() {
		b := m.Marshal()
		got := reflect.New(reflect.TypeOf(m).Elem()).Interface().(message)
		if err := got.Unmarshal(b); err != nil {
			t.Fatalf("%T: %v", m, err)
		}
		if !reflect.DeepEqual(m, got) {
			t.Errorf("%T: sent %+v, received %+v", m, m, got)
		}
		// Every cut and every excess must be noticed.
		for i := range b {
			if err := got.Unmarshal(b[:i]); !errors.Is(err, ErrMalformed) {
				t.Errorf("%T cut to %d of %d bytes: %v", m, i, len(b), err)
			}
		}
		if err := got.Unmarshal(append(bytes.Clone(b), 0)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%T with a byte too many: %v", m, err)
		}
	}
}

func TestFramesSplitAtAnyByte(t *testing.T) {
	var stream []byte
	want := []Frame{{KindHello, 1, nil}, {KindDone, 1 << 31, []byte("abc")}, {KindExited, 0, bytes.Repeat([]byte{7}, 70000)}}
	for _, f := range want {
		stream = AppendFrame(stream, f)
	}
	for _, step := range []int{1, 2, 13, len(stream)} {
		var buf []byte
		var got []Frame
		for rest := stream; len(rest) > 0; {
			n := min(step, len(rest))
			buf, rest = append(buf, rest[:n]...), rest[n:]
			for {
				f, used, err := NextFrame(buf)
				if err != nil {
					t.Fatal(err)
				}
				if used == 0 {
					break
				}
				f.Body = bytes.Clone(f.Body)
				got, buf = append(got, f), buf[used:]
			}
		}
		if len(got) != len(want) {
			t.Fatalf("step %d: %d frames of %d", step, len(got), len(want))
		}
		for i := range want {
			if got[i].Kind != want[i].Kind || got[i].ID != want[i].ID || !bytes.Equal(got[i].Body, want[i].Body) {
				t.Errorf("step %d: frame %d differs", step, i)
			}
		}
	}
}

func TestBadFramesAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		in   []byte
		want error
	}{
		"too long":     {[]byte{1, 0, 16, 0}, ErrTooLong},
		"too short":    {[]byte{8, 0, 0, 0}, ErrMalformed},
		"kind zero":    {[]byte{9, 0, 0, 0, 0, 0, 0, 0, 0}, ErrMalformed},
		"kind unknown": {[]byte{9, 0, 0, 0, 99, 0, 0, 0, 0}, ErrMalformed},
	} {
		if _, _, err := NextFrame(c.in); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzFrames(f *testing.F) {
	for i, m := range samples() {
		f.Add(AppendFrame(nil, Frame{Kind: KindPause, ID: uint32(i), Body: m.Marshal()}))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		fr, n, err := NextFrame(in)
		if err != nil || n == 0 {
			return
		}
		if again := AppendFrame(nil, fr); !bytes.Equal(again, in[:n]) {
			t.Fatalf("frame %x came back as %x", in[:n], again)
		}
		for _, m := range samples() {
			if m.Unmarshal(fr.Body) != nil {
				continue
			}
			// What was understood must mean the same after another trip.
			again := reflect.New(reflect.TypeOf(m).Elem()).Interface().(message)
			if err := again.Unmarshal(m.Marshal()); err != nil || !reflect.DeepEqual(m, again) {
				t.Fatalf("%T: %v: %+v became %+v", m, err, m, again)
			}
		}
	})
}
