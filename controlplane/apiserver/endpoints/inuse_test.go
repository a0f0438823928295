package endpoints

import (
	"testing"

	v1 "k8s.io/api/core/v1"
)

// What many watches send at once is encoded once, and forgotten when the last of them has sent it.
func TestEncodingsInUseAreShared(t *testing.T) {
	var u sharedEncodings
	as := encodingShape{format: Format{Media: mediaJSON}}
	obj, made := &v1.ConfigMap{}, 0
	encode := func() ([]byte, error) { made++; return []byte("x"), nil }
	var releases []func()
	for range 10 {
		data, release, err := u.encodeShared(obj, as, encode)
		if err != nil || string(data) != "x" {
			t.Fatalf("%q, %v", data, err)
		}
		releases = append(releases, release)
	}
	if _, release, _ := u.encodeShared(&v1.ConfigMap{}, as, encode); made != 2 {
		t.Errorf("encoded %d times for two objects", made)
	} else {
		release()
	}
	for _, release := range releases {
		if len(u.encodings) != 1 {
			t.Errorf("%d are held while one is in use", len(u.encodings))
		}
		release()
	}
	if len(u.encodings) != 0 {
		t.Errorf("%d are held while none is in use", len(u.encodings))
	}
}
