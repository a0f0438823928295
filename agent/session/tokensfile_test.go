package session

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A file of tokens that the previous release wrote is read, and is written again in the same form.
func TestTokensFileOfThePreviousRelease(t *testing.T) {
	golden, err := os.ReadFile("testdata/tokens.json")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, tokensFile)
	if err := os.WriteFile(file, golden, 0o600); err != nil {
		t.Fatal(err)
	}
	cache := newTokenCache(dir, func() {})
	if err := cache.loadTokens(time.Date(2096, 11, 29, 15, 0, 0, 0, time.UTC)); err != nil {
		t.Fatal(err)
	}
	one := cache.cached[tokenKey{Pod: "u1", Audience: "vault", Expiration: 3600}]
	if one.Token != "one" || !one.Expires.Equal(time.Date(2096, 11, 29, 16, 0, 0, 0, time.UTC)) ||
		len(cache.cached) != 2 {
		t.Fatalf("read %+v", cache.cached)
	}
	delete(cache.cached, one.Key)
	cache.saveTokens()
	written, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want := append([]byte("["), golden[bytes.Index(golden, []byte(`{"Key":{"Pod":"u2"`)):]...)
	if !bytes.Equal(written, want) {
		t.Errorf("written %s\nwant    %s", written, want)
	}
}
