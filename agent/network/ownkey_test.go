package network

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"keelson.dev/keelson/internal/durable"
)

// told waits until a new key is signaled on both channels.
func told(t *testing.T, ctx context.Context, k *OwnKey) wgtypes.Key {
	t.Helper()
	for _, c := range []<-chan struct{}{k.forRoutes, k.Changed()} {
		select {
		case <-c:
		case <-ctx.Done():
			t.Fatal("nobody was told of a new key")
		}
	}
	return k.Key()
}

// F108: a key that is replaced or removed while the agent runs is reloaded. A file without a valid
// key changes nothing.
func TestKeyIsReplaced(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	folder := t.TempDir()
	k, err := OpenOwnKey(folder, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(folder, KeyFile)
	first := k.Key()
	ended := make(chan error, 1)
	follow := func() { ended <- k.followFile(ctx, time.Millisecond) }
	go follow()

	next := keyOf("next")
	raw, err := json.Marshal(keyFile{keyVersion, next.String()})
	if err != nil {
		t.Fatal(err)
	}
	if err := durable.WriteIfChanged(file, raw, durable.Intact); err != nil {
		t.Fatal(err)
	}
	if got := told(t, ctx, k); got != next {
		t.Errorf("the key is %s, want that of the file", got.PublicKey())
	}
	if r := (&Routes{OwnKey: k, Encryption: Encryption{Port: 7}}).currentEncryption(); r.Key != next || r.Port != 7 {
		t.Errorf("routes go by port %d and key %s", r.Port, r.Key.PublicKey())
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	made := told(t, ctx, k)
	if kept, err := readKey(file); err != nil || made == next || made == first || kept != made {
		t.Errorf("after the file was removed the key is %s, and the file's %v", made.PublicKey(), err)
	}

	if err := durable.WriteIfChanged(file, []byte("none"), durable.Intact); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "is not a WireGuard key file") {
		t.Errorf("it ends with %v", err)
	}
	if k.Key() != made {
		t.Error("a file without a key changed it")
	}
	if err := durable.WriteIfChanged(file, raw, durable.Intact); err != nil { // while Follow is not running
		t.Fatal(err)
	}
	go follow()
	if got := told(t, ctx, k); got != next {
		t.Errorf("the key is %s after the file was mended", got.PublicKey())
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it ends with %v", err)
	}
}
