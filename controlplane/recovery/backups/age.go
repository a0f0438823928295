package backups

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"filippo.io/age"
)

// A backup that is sealed by age is a file of age's own format, version 1, with a backup in clear inside: whoever has an
// identity opens it with any program that knows the format, and no key of the cluster is needed.

var (
	// ErrNeedsIdentity says that a backup is sealed by age, and no identity is named.
	ErrNeedsIdentity = errors.New("the backup is sealed by age")
	// ErrOtherIdentity says that no identity that is named opens a backup.
	ErrOtherIdentity = errors.New("no identity opens the backup")
)

const (
	ageMagic      = "age-encryption.org/v1\n"
	ageArmor      = "-----BEGIN AGE ENCRYPTED FILE-----"
	maxAgeHeader  = 64 << 10 // a recipient takes some 120 bytes, one against quantum computers 1.6 kB
	maxAgeFile    = 64 << 10 // of recipients or identities
	mostAgeStanza = 40
)

// Recipients says to whom backups are sealed.
type Recipients struct {
	Keys []string // age1...
	File string   // one per line, as age takes it
}

// Any says that backups are sealed by age.
func (r Recipients) Any() bool { return len(r.Keys) > 0 || r.File != "" }

// parse reads the recipients as they are now. Errors name the flag.
func (r Recipients) parse() (out []age.Recipient, err error) {
	for _, key := range r.Keys {
		one, err := parseRecipients("--backup-recipient", strings.NewReader(key))
		if err != nil {
			return nil, err
		}
		if len(one) != 1 {
			return nil, fmt.Errorf("--backup-recipient %q: want one recipient of age, age1...", shown(key))
		}
		out = append(out, one...)
	}
	if r.File != "" {
		f, err := os.Open(r.File)
		if err != nil {
			return nil, fmt.Errorf("--backup-recipients-file: %w", err)
		}
		defer f.Close()
		of, err := parseRecipients("--backup-recipients-file", f)
		if err != nil {
			return nil, err
		}
		out = append(out, of...)
	}
	if len(out) > mostAgeStanza {
		return nil, fmt.Errorf("--backup-recipient: %d recipients, at most %d", len(out), mostAgeStanza)
	}
	return out, nil
}

// parseRecipients never repeats what is a secret: a line that begins as an identity does.
func parseRecipients(flag string, r io.Reader) ([]age.Recipient, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxAgeFile+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	if len(text) > maxAgeFile {
		return nil, fmt.Errorf("%s: more than %d bytes", flag, maxAgeFile)
	}
	if bytes.Contains(bytes.ToUpper(text), []byte("AGE-SECRET-KEY-")) {
		return nil, fmt.Errorf("%s: that is an identity, a secret: want its recipient, age1..., which 'age-keygen -y' tells", flag)
	}
	out, err := age.ParseRecipients(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("%s: want recipients of age, age1... (no SSH keys, no plugins): %w", flag, err)
	}
	return out, nil
}

func shown(text string) string {
	if len(text) > 20 {
		return text[:20] + "..."
	}
	return text
}

// Seal makes of what writes a backup in clear what writes one sealed by age. Nothing passes in clear, and what broke off
// is no whole file of age's.
func Seal(to Recipients, clear func(context.Context, io.Writer) error) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		recipients, err := to.parse()
		if err != nil {
			return err
		}
		sealed, err := age.Encrypt(w, recipients...)
		if err != nil {
			return fmt.Errorf("sealing by age: %w", err)
		}
		if err := clear(ctx, sealed); err != nil {
			return err
		}
		return sealed.Close()
	}
}

// Check says what is wrong with recipients.
func (r Recipients) Check() error {
	_, err := r.parse()
	return err
}

// Sealed is what the head of a file that age has sealed tells without an identity; nil of any other file.
type Sealed struct{ Recipients []string } // the kind of each: X25519, mlkem768x25519 ...

// Sealing looks whether a file is sealed by age.
func Sealing(r io.Reader) (*Sealed, error) {
	head := make([]byte, len(ageMagic))
	n, _ := io.ReadFull(r, head) // a file that is shorter is none
	switch {
	case strings.HasPrefix(ageArmor, string(head[:n])) && n == len(head):
		return nil, errors.New("it is age's file in letters: 'age --decrypt' makes a backup in clear of it")
	case string(head[:n]) != ageMagic:
		return nil, nil
	}
	header, err := age.ExtractHeader(io.LimitReader(io.MultiReader(bytes.NewReader(head), r), maxAgeHeader))
	if err != nil {
		return nil, fmt.Errorf("its head is none of age's: %w", err)
	}
	s := &Sealed{}
	for line := range strings.Lines(string(header)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == "->" {
			s.Recipients = append(s.Recipients, words[1])
		}
	}
	if len(s.Recipients) > mostAgeStanza {
		return nil, fmt.Errorf("it is sealed to %d recipients, at most %d are read", len(s.Recipients), mostAgeStanza)
	}
	return s, nil
}

// Open returns what is inside of a backup file: the file itself, or, where it is sealed by age, what an identity of the file
// identity opens; sealed is nil then or says to whom. Errors: ErrNeedsIdentity, ErrOtherIdentity.
func Open(f *os.File, identity string) (inside io.ReadSeeker, sealed *Sealed, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	sealed, err = Sealing(io.NewSectionReader(f, 0, info.Size()))
	if err != nil || sealed == nil {
		return f, nil, err
	}
	if identity == "" {
		return nil, sealed, fmt.Errorf("%w to %s: --identity names the file of one of their identities", ErrNeedsIdentity, sealed)
	}
	identities, err := readIdentities(identity)
	if err != nil {
		return nil, sealed, err
	}
	clear, size, err := age.DecryptReaderAt(f, info.Size(), identities...)
	var none *age.NoIdentityMatchError
	if errors.As(err, &none) {
		return nil, sealed, fmt.Errorf("%w: it is sealed to %s, and %s has none of theirs", ErrOtherIdentity, sealed, identity)
	}
	if err != nil {
		return nil, sealed, fmt.Errorf("opening it with %s: %w", identity, err)
	}
	return io.NewSectionReader(clear, 0, size), sealed, nil
}

// String says to whom it is sealed.
func (s *Sealed) String() string {
	kinds := slices.Compact(slices.Sorted(slices.Values(s.Recipients)))
	noun := "recipients"
	if len(s.Recipients) == 1 {
		noun = "recipient"
	}
	return fmt.Sprintf("%d %s (%s)", len(s.Recipients), noun, strings.Join(kinds, ", "))
}

// readIdentities reads a file of identities, which nobody but its owner may read. No error repeats what is in it.
func readIdentities(path string) ([]age.Identity, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--identity: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("--identity: %w", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("--identity: %s has mode %v, others must not read it (chmod 600)", path, info.Mode())
	}
	if info.Size() > maxAgeFile {
		return nil, fmt.Errorf("--identity: %s has %d bytes, at most %d", path, info.Size(), maxAgeFile)
	}
	out, err := age.ParseIdentities(io.LimitReader(f, maxAgeFile))
	if err != nil {
		return nil, fmt.Errorf("--identity: %s: want identities of age, AGE-SECRET-KEY-1..., one per line, in clear", path)
	}
	return out, nil
}
