package decodelimits

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
)

func TestFromCBOR(t *testing.T) {
	long := strings.Repeat("\xc6", MaxDepth+1) + "\x01" // tags
	for _, c := range []struct {
		name, data, want string
		much             bool
	}{
		{"numbers", "\x83\x01\x20\xf9\x3c\x00", "[1,-1,1.0]", false},
		{"an indefinite map", "\xbf\x61a\x9f\xf5\xf6\xff\xff", `{"a":[true,null]}`, false},
		{"bytes are text", "\x42hi", `"hi"`, false},
		{"bytes that are base64 in JSON", "\xd6\x42hi", `"aGk="`, false},
		{"with the mark", "\xd9\xd9\xf7\xa0", "{}", false},
		{"a key twice", "\xa2\x61a\x01\x61a\x02", "", false},
		{"cut off", "\xa1\x61a", "", false},
		{"two items", "\x01\x01", "", false},
		{"no number", "\xf9\x7e\x00", "", false},
		{"deep", strings.Repeat("\x81", MaxDepth+2) + "\x01", "", true},
		{"deep by tags", long, "", true},
		{"many items", "\x99\xff\xff" + strings.Repeat("\x01", 0xffff), "", true},
		{"many items without an end", "\x9f" + strings.Repeat("\x01", 0xffff) + "\xff", "", true},
		{"many keys", "\xbf" + strings.Repeat("\x00", 0xffff) + "\xff", "", true},
		{"a list that says it is endless", "\x9b\xff\xff\xff\xff\xff\xff\xff\xff\x01", "", false},
		{"a text in very many pieces", "\x7f" + strings.Repeat("\x60", 1<<19) + "\xff", "", true},
		{"large when written out", "\x7a\x00\x20\x00\x00" + strings.Repeat("\x01", 2<<20), "", true},
	} {
		got, err := FromCBOR([]byte(c.data))
		if (err != nil) != (c.want == "") || errors.Is(err, ErrTooMuch) != c.much || string(got) != c.want {
			t.Errorf("%s: %.100s %v", c.name, got, err)
		}
	}
}

// What is read from CBOR is what Kubernetes' decoder reads, and within the limits.
func FuzzCBOR(f *testing.F) {
	for _, v := range []any{nil, map[string]any{"a": []any{1, "x", 1.5, true}, "b": []byte("raw")},
		strings.Repeat("x", 300)} {
		data, err := direct.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("\xbf\x61a\x9f\xf5\xf6\xff\xff"))
	f.Add([]byte("\x9b\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Fuzz(func(t *testing.T, data []byte) {
		out, err := FromCBOR(data)
		if err != nil {
			return
		}
		if !json.Valid(out) || CheckJSON(out, nil) != nil {
			t.Fatalf("%x became %s", data, out)
		}
		var want, got any
		if err := direct.Unmarshal(data, &want); err != nil {
			t.Fatalf("%x is refused by Kubernetes: %v", data, err)
		}
		said, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(said, &want); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out, &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%x became %s, not %s (%v)", data, out, said, err)
		}
	})
}
