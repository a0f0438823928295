package backups

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"

	"keelson.dev/keelson/internal/diskheadroom"
	"keelson.dev/keelson/internal/virtual"
)

// keyPair creates an age identity and returns its file and its recipient.
func keyPair(t testing.TB) (file, recipient string) {
	t.Helper()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return writeTempFile(t, "# made for a test\n"+id.String()+"\n", 0o600), id.Recipient().String()
}

func writeTempFile(t testing.TB, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// openBackup returns the content that Open reads from a file.
func openBackup(t testing.TB, path, identity string) (string, error) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	in, _, err := Open(f, identity)
	if err != nil {
		return "", err
	}
	var twice [2]string
	for i := range twice { // a restore reads the content more than once
		if _, err := in.Seek(0, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(in)
		if err != nil {
			return "", err
		}
		twice[i] = string(raw)
	}
	if twice[0] != twice[1] {
		t.Error("the second read differs")
	}
	return twice[0], nil
}

// F52: a backup in a folder that is encrypted with age can be decrypted with the identity of each
// recipient, by this package and by age itself, and with no other identity. Recipients come from
// flags and from a file. The file contains no plaintext.
func TestSealedToFolder(t *testing.T) {
	one, first := keyPair(t)
	other, second := keyPair(t)
	stranger, _ := keyPair(t)
	to := Recipients{Keys: []string{first}, File: writeTempFile(t, "# the vault's\n"+second+"\n\n", 0o644)}
	dir, state := t.TempDir(), strings.Repeat("the state ", 100_000)
	virtual.Test(t, func(t *testing.T) {
		s := &fakeStore{content: "sealed as the store is"}
		k, err := New(Config{Options: Options{Schedule: "@daily", Folder: dir, Keep: 2, Recipients: to},
			Cluster: "prod",
			ID:      "prod-1a2b", Replica: "cp1",
			Write: s.write, WriteUnencrypted: writerOf(state), Log: slog.New(slog.DiscardHandler)})
		if err == nil {
			err = k.makeBackup(t.Context())
		}
		if err != nil || s.countCalls() != 0 {
			t.Fatalf("%v; the encrypted form was written %d times", err, s.countCalls())
		}
	})
	found, err := ListBackups(t.Context(), Options{Folder: dir})
	if err != nil || len(found) != 1 {
		t.Fatalf("got %v, %v", found, err)
	}
	path := found[0].Name
	raw, err := os.ReadFile(path)
	if err != nil || bytes.Contains(raw, []byte("the state")) {
		t.Errorf("the backup is not encrypted: %v", err)
	}
	for _, id := range []string{one, other} {
		if text, err := openBackup(t, path, id); err != nil || text != state {
			t.Errorf("an identity decrypts %d bytes of %d, %v", len(text), len(state), err)
		}
	}
	if _, err := openBackup(t, path, stranger); !errors.Is(err, ErrOtherIdentity) {
		t.Errorf("an unrelated identity: %v", err)
	}
	if _, err := openBackup(t, path, ""); !errors.Is(err, ErrNeedsIdentity) ||
		!strings.Contains(err.Error(), "2 recipients (X25519)") {
		t.Errorf("without an identity: %v", err)
	}
	text, err := os.ReadFile(one)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := age.ParseIdentities(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if r, err := age.Decrypt(bytes.NewReader(raw), ids...); err != nil {
		t.Error(err)
	} else if plain, err := io.ReadAll(r); err != nil || string(plain) != state {
		t.Errorf("age itself reads %d bytes, %v", len(plain), err)
	}
	// A file that age itself has encrypted can be read.
	foreign := filepath.Join(t.TempDir(), "foreign")
	var sealed bytes.Buffer
	w, err := age.Encrypt(&sealed, ids[0].(*age.X25519Identity).Recipient())
	if err == nil {
		_, err = io.WriteString(w, state)
	}
	if err = errors.Join(err, w.Close(), os.WriteFile(foreign, sealed.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	if text, err := openBackup(t, foreign, one); err != nil || text != state {
		t.Errorf("read %d bytes of age's own file, %v", len(text), err)
	}
}

// F52: a backup in a bucket that is encrypted with age is listed, fetched and decrypted.
func TestSealedToBucket(t *testing.T) {
	s := startBucket(t, nil)
	id, recipient := keyPair(t)
	state := strings.Repeat("the state ", 200_000)
	o := Options{Schedule: "@daily", S3: s.s3, Keep: 2, Recipients: Recipients{Keys: []string{recipient}}}
	k, err := New(Config{Options: o, Cluster: "prod", ID: "prod-1a2b", Replica: "cp1",
		WriteUnencrypted: writerOf(state),
		IsLeader:         func() bool { return true }, Log: slog.New(slog.DiscardHandler)})
	if err == nil {
		err = k.makeBackup(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	s.putObjects(t, "of/ours/notes.txt", "of/ours/prod-1a2b_cp1_19990101T000000Z.backup")
	found, err := ListBackups(t.Context(), Options{S3: s.s3})
	if err != nil || len(found) != 2 || found[1].MadeAt.Year() != 1999 {
		t.Fatalf("got %v, %v", found, err)
	}
	var raw bytes.Buffer
	if err := Fetch(t.Context(), Options{S3: s.s3}, found[0], diskheadroom.Target{}, &raw); err != nil {
		t.Fatal(err)
	}
	if text, err := openBackup(t, writeTempFile(t, raw.String(), 0o600), id); err != nil || text != state {
		t.Errorf("decrypted %d bytes of %d, %v", len(text), len(state), err)
	}
	if err := Fetch(t.Context(), Options{S3: s.s3}, FoundBackup{Name: "of/ours/none"}, diskheadroom.Target{},
		io.Discard); err == nil {
		t.Error("a missing backup was fetched")
	}
}

// An encrypted backup that was interrupted is not a complete age file.
func TestIncompleteEncryption(t *testing.T) {
	id, recipient := keyPair(t)
	broken := errors.New("no more")
	var out bytes.Buffer
	err := EncryptWith(Recipients{Keys: []string{recipient}}, func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, strings.Repeat("half ", 50_000))
		return errors.Join(err, broken)
	})(t.Context(), &out)
	if !errors.Is(err, broken) {
		t.Fatal(err)
	}
	if _, err := openBackup(t, writeTempFile(t, out.String(), 0o600), id); err == nil {
		t.Error("the incomplete backup was decrypted")
	}
}

func TestRecipientsAreStrict(t *testing.T) {
	id, recipient := keyPair(t)
	secret, err := os.ReadFile(id)
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		of   Recipients
		want string // part of the error; "" = no error
	}{
		"none":           {Recipients{}, ""},
		"one":            {Recipients{Keys: []string{recipient}}, ""},
		"no recipient":   {Recipients{Keys: []string{"bob"}}, "--backup-recipient: want recipients of age"},
		"empty":          {Recipients{Keys: []string{""}}, "--backup-recipient"},
		"two in one":     {Recipients{Keys: []string{recipient + "\n" + recipient}}, "want one recipient"},
		"a letter wrong": {Recipients{Keys: []string{recipient[:len(recipient)-1] + "b"}}, "--backup-recipient"},
		"an SSH key":     {Recipients{Keys: []string{"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBob"}}, "no SSH keys"},
		"an identity": {Recipients{Keys: []string{strings.Fields(string(secret))[5]}},
			"that is an identity, a secret"},
		"in a file":     {Recipients{File: id}, "--backup-recipients-file: that is an identity"},
		"no file":       {Recipients{File: id + "x"}, "--backup-recipients-file: open"},
		"an empty file": {Recipients{File: writeTempFile(t, "# nobody\n", 0o600)}, "--backup-recipients-file"},
		"a large file":  {Recipients{File: writeTempFile(t, strings.Repeat("#\n", maxAgeFile), 0o600)}, "bytes"},
		"too many": {Recipients{File: writeTempFile(t, strings.Repeat(recipient+"\n", maxRecipients+1), 0o600)},
			"at most"},
	} {
		err := c.of.Check()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", what, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), "AGE-SECRET") {
			t.Errorf("%s: the error repeats the secret: %v", what, err)
		}
	}
	if err := (Options{Recipients: Recipients{Keys: []string{recipient}}}).Check(); err == nil ||
		!strings.Contains(err.Error(), "--backup-schedule") {
		t.Errorf("recipients without a schedule: %v", err)
	}
	sealed := filepath.Join(t.TempDir(), "sealed")
	f, err := os.Create(sealed)
	if err == nil {
		err = errors.Join(EncryptWith(Recipients{Keys: []string{recipient}}, writerOf("x"))(t.Context(), f), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string][2]string{
		"readable by others": {writeTempFile(t, string(secret), 0o644), "others must not read it"},
		"no file":            {id + "x", "--identity: open"},
		"a recipient":        {writeTempFile(t, recipient, 0o600), "want identities of age"},
		"no identity":        {writeTempFile(t, "AGE-SECRET-KEY-1BOB", 0o600), "want identities of age"},
		"a folder":           {t.TempDir(), "--identity"},
		"far too large":      {writeTempFile(t, strings.Repeat("#\n", maxAgeFile), 0o600), "at most"},
		"empty":              {writeTempFile(t, "", 0o600), "want identities of age"},
	} {
		if _, err := openBackup(t, sealed, c[0]); err == nil || !strings.Contains(err.Error(), c[1]) ||
			strings.Contains(err.Error(), "BOB") {
			t.Errorf("identity file, %s: %v, want %q", what, err, c[1])
		}
	}
}

// FuzzOpen checks that Open terminates for any content, and returns at most as many bytes as the
// file has.
func FuzzOpen(f *testing.F) {
	id, recipient := keyPair(f)
	var good bytes.Buffer
	if err := EncryptWith(Recipients{Keys: []string{recipient}}, writerOf("the state"))(f.Context(), &good); err !=
		nil {
		f.Fatal(err)
	}
	f.Add(good.Bytes())
	f.Add(good.Bytes()[:good.Len()-1])
	f.Add([]byte(ageMagic + "-> X25519 " + strings.Repeat("A", 100_000)))
	f.Add([]byte(ageMagic + strings.Repeat("-> X25519 TEiF0ypqr+bpvcqXNyCVJpL7OuwPdVwPL7KQEbFDOCc\nAAAA\n", 2000)))
	f.Add([]byte(ageArmor + "\n"))
	f.Add([]byte("keelback"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, raw []byte) {
		path := filepath.Join(dir, "file")
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		in, sealed, err := Open(file, id)
		if err != nil {
			return
		}
		text, err := io.ReadAll(in)
		if err == nil && (len(text) > len(raw) || sealed == nil && !bytes.Equal(text, raw)) {
			t.Errorf("read %d bytes from a file of %d", len(text), len(raw))
		}
		if err == nil && sealed != nil && string(text) != "the state" {
			t.Errorf("decrypted %q", text)
		}
	})
}
