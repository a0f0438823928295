package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

// sampleMessages are a message of each kind; those of version 0 have no field that came later.
func sampleMessages(version int64) []Message {
	create := &Create{Container: "c", OCI: "o", Bundle: "b", Log: "l", LogSize: 1 << 40, LogFiles: 5,
		ExitFile: "e", OOMFile: "m",
		TTY: true, Stdin: true, StdinOnce: true}
	snap := &Snapshot{PausePID: 3, PauseEnded: true, Containers: []Status{
		{Container: "c", State: StateExited, PID: 9, Started: 5, Exit: Exited{Code: 1}}, {Container: "d"}}}
	all := []Message{
		&Pause{Root: "/r", Program: "/p", NetNS: "/n", NewIPC: true, NewPID: true, Hostname: "h",
			Sysctls: []string{"a=1", ""}},
		create,
		&Start{Container: "c", Fifo: "f"},
		&Signal{Container: "c", Exec: 1<<32 - 1, Signal: 15},
		&Exec{Container: "c", OCI: "o", Bundle: "b", TTY: true},
		&Attach{Container: "c", Stdin: true, Stderr: true},
		&Resize{Container: "c", Width: 80, Height: 24},
		&Target{Container: "c"},
		&Done{Error: "no", Time: -1},
		&Started{Error: "e", PID: 7, Result: "{}"},
		&Exited{Container: "c", Code: 137, Time: 1 << 62, OOM: true},
		snap,
	}
	if version > 0 {
		create.EndFile, create.EndNote = "/end", "note"
		all = append(all, &Hello{Version: version, Features: 5},
			&Welcome{Version: version, Features: 1<<63 | 1, Snapshot: *snap})
	}
	return all
}

func newBlank(m Message) Message { return reflect.New(reflect.TypeOf(m).Elem()).Interface().(Message) }

// A shim lives as long as its pod: what a released version has written must be read for ever.
func TestBytesOfReleasedVersions(t *testing.T) {
	for version := range Version + 1 {
		golden, err := os.ReadFile(fmt.Sprintf("testdata/version-%d.txt", version))
		if err != nil {
			t.Fatal(err)
		}
		var now strings.Builder
		for _, m := range sampleMessages(version) {
			fmt.Fprintf(&now, "%s %x\n", strings.TrimPrefix(fmt.Sprintf("%T", m), "*wire."), Marshal(version, m))
		}
		if now.String() != string(golden) {
			t.Errorf("version %d is written otherwise than it was released:\n%s", version, now.String())
		}
		for i, line := range strings.Split(strings.TrimSpace(string(golden)), "\n") {
			_, text, _ := strings.Cut(line, " ")
			b, err := hex.DecodeString(text)
			if err != nil {
				t.Fatal(err)
			}
			want := sampleMessages(version)[i]
			got := newBlank(want)
			if err := Unmarshal(version, b, got); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("version %d: %s reads as %+v: %v", version, line, got, err)
			}
		}
	}
}

func TestVersionZeroIsExact(t *testing.T) {
	for _, m := range sampleMessages(0) {
		b := Marshal(0, m)
		for i := range b {
			if err := Unmarshal(0, b[:i], newBlank(m)); !errors.Is(err, ErrMalformed) {
				t.Errorf("%T cut to %d of %d bytes: %v", m, i, len(b), err)
			}
		}
		if err := Unmarshal(0, append(bytes.Clone(b), 0), newBlank(m)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%T with a byte too many: %v", m, err)
		}
	}
}

// A later release adds fields of any type; an earlier one lacks some.
func TestUnknownFieldsAreSkipped(t *testing.T) {
	unknown := [][]byte{
		{0xf8, 0x07, 0x96, 0x01},             // 127: a number
		{0xfa, 0x07, 3, 'n', 'e', 'w'},       // 127: bytes
		{0xf9, 0x07, 1, 2, 3, 4, 5, 6, 7, 8}, // 127: eight bytes
		{0xfd, 0x07, 1, 2, 3, 4},             // 127: four bytes
	}
	for _, m := range sampleMessages(1) {
		b := Marshal(1, m)
		for _, u := range unknown {
			for _, in := range [][]byte{append(bytes.Clone(u), b...), append(bytes.Clone(b), u...)} {
				got := newBlank(m)
				if err := Unmarshal(1, in, got); err != nil || !reflect.DeepEqual(m, got) {
					t.Errorf("%T with an unknown field %x: %+v, %v", m, u, got, err)
				}
			}
		}
		if got := newBlank(m); Unmarshal(1, nil, got) != nil || !reflect.DeepEqual(got, newBlank(m)) {
			t.Errorf("%T without any field is not its zero: %+v", m, got)
		}
	}
	for name, in := range map[string][]byte{"a string where a number is due": {0x12, 1, 'x'},
		"a length beyond the end": {0x0a, 9, 'x'},
		"field zero":              {0x02, 0}, "a group": {0x0b}, "half a number": {0x10, 0x80}} {
		if err := Unmarshal(1, in, &Done{}); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFramesSplitAtAnyByte(t *testing.T) {
	var stream []byte
	want := []Frame{{KindHello, 1, nil}, {KindDone, 1 << 31, []byte("abc")},
		{KindExited, 0, bytes.Repeat([]byte{7}, 70000)}}
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
		"kind unknown": {[]byte{9, 0, 0, 0, 99, 0, 0, 0, 0}, nil}, // the other side is of a later release
	} {
		if _, _, err := NextFrame(c.in); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzFrames(f *testing.F) {
	for version := range Version + 1 {
		for i, m := range sampleMessages(version) {
			f.Add(AppendFrame(nil, Frame{Kind: KindPause, ID: uint32(i), Body: Marshal(version, m)}))
		}
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		fr, n, err := NextFrame(in)
		if err != nil || n == 0 {
			return
		}
		if again := AppendFrame(nil, fr); !bytes.Equal(again, in[:n]) {
			t.Fatalf("frame %x came back as %x", in[:n], again)
		}
		for version := range Version + 1 {
			for _, m := range sampleMessages(version) {
				m = newBlank(m)
				if Unmarshal(version, fr.Body, m) != nil {
					continue
				}
				// What was understood must mean the same after another trip.
				again := newBlank(m)
				if err := Unmarshal(version, Marshal(version, m), again); err != nil || !reflect.DeepEqual(m, again) {
					t.Fatalf("%T: %v: %+v became %+v", m, err, m, again)
				}
			}
		}
	})
}
