package arp

import (
	"bytes"
	"encoding/hex"
	"net"
	"net/netip"
	"reflect"
	"testing"
)

const request = "0001" + "0800" + "06" + "04" + "0001" + "020000000001" + "0a000001" + "000000000000" + "0a000002"

func TestPacket(t *testing.T) {
	want, err := hex.DecodeString(request)
	if err != nil {
		t.Fatal(err)
	}
	p := Packet{
		Operation: Request,
		SenderMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Sender: netip.MustParseAddr("10.0.0.1"),
		TargetMAC: make(net.HardwareAddr, 6), Target: netip.MustParseAddr("10.0.0.2"),
	}
	if got := p.Marshal(); !bytes.Equal(got, want) {
		t.Errorf("marshaled %x, want %x", got, want)
	}
	padded := append(append([]byte(nil), want...), make([]byte, 18)...)
	if got, ok := Parse(padded); !ok || !reflect.DeepEqual(got, p) {
		t.Errorf("parsed %+v, %t, want %+v", got, ok, p)
	}
	for name, damage := range map[string]func(b []byte) []byte{
		"a byte is missing":              func(b []byte) []byte { return b[:Length-1] },
		"hardware is not Ethernet":       func(b []byte) []byte { b[1] = 6; return b },
		"protocol is not IPv4":           func(b []byte) []byte { b[2] = 0x86; return b },
		"hardware addresses of 8 bytes":  func(b []byte) []byte { b[4] = 8; return b },
		"protocol addresses of 16 bytes": func(b []byte) []byte { b[5] = 16; return b },
		"no bytes":                       func([]byte) []byte { return nil },
	} {
		if p, ok := Parse(damage(bytes.Clone(want))); ok {
			t.Errorf("%s: parsed %+v", name, p)
		}
	}
}

func FuzzParse(f *testing.F) {
	seed, _ := hex.DecodeString(request)
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, ok := Parse(b); ok && !bytes.Equal(p.Marshal(), b[:Length]) {
			t.Errorf("%x becomes %x", b, p.Marshal())
		}
	})
}
