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

// A backup that is encrypted with age is a file in age's own format, version 1, which contains an
// unencrypted backup. The owner of an identity can decrypt it with any program that supports this
// format. No key of the cluster is needed.

var (
	// ErrNeedsIdentity is returned for a backup that is encrypted with age, if the caller has no
	// file of age identities (private keys).
	ErrNeedsIdentity = errors.New("the backup is encrypted with age")
	// ErrOtherIdentity is returned if no configured identity can decrypt the backup.
	ErrOtherIdentity = errors.New("no identity decrypts the backup")
)

const (
	ageMagic      = "age-encryption.org/v1\n"
	ageArmor      = "-----BEGIN AGE ENCRYPTED FILE-----"
	maxAgeHeader  = 64 << 10 // a recipient needs about 120 bytes, a post-quantum recipient 1.6 kB
	maxAgeFile    = 64 << 10 // maximum size of a file of recipients or identities, in bytes
	maxRecipients = 40
)

// Recipients are the age recipients (public keys) for which backups are encrypted.
type Recipients struct {
	Keys []string // public keys, age1...
	File string   // path of an age recipients file, one public key per line
}

// IsSet reports whether backups are encrypted with age.
func (r Recipients) IsSet() bool { return len(r.Keys) > 0 || r.File != "" }

// loadRecipients parses the recipients in Keys and File. The error names the flag of the invalid
// recipient.
func (r Recipients) loadRecipients() (out []age.Recipient, err error) {
	for _, key := range r.Keys {
		one, err := parseRecipients("--backup-recipient", strings.NewReader(key))
		if err != nil {
			return nil, err
		}
		if len(one) != 1 {
			return nil, fmt.Errorf("--backup-recipient %q: want one recipient of age, age1...", truncateKey(key))
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
	if len(out) > maxRecipients {
		return nil, fmt.Errorf("--backup-recipient: %d recipients, at most %d", len(out), maxRecipients)
	}
	return out, nil
}

// parseRecipients parses the recipients in r, which is the value of a flag. The error names the
// flag. If r contains an age identity (a private key) by mistake, the error does not contain that
// identity.
func parseRecipients(flag string, r io.Reader) ([]age.Recipient, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxAgeFile+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	if len(text) > maxAgeFile {
		return nil, fmt.Errorf("%s: more than %d bytes", flag, maxAgeFile)
	}
	if bytes.Contains(bytes.ToUpper(text), []byte("AGE-SECRET-KEY-")) {
		return nil,
			fmt.Errorf("%s: that is an identity, a secret: want its recipient, age1..., which 'age-keygen -y' "+
				"prints",
				flag)
	}
	out, err := age.ParseRecipients(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("%s: want recipients of age, age1... (no SSH keys, no plugins): %w", flag, err)
	}
	return out, nil
}

func truncateKey(text string) string {
	if len(text) > 20 {
		return text[:20] + "..."
	}
	return text
}

// EncryptWith returns a function that writes a backup to w, encrypted with age for recipients.
// writePlain writes the unencrypted backup. If writePlain fails, the output is not a complete age
// file.
func EncryptWith(
	recipients Recipients, writePlain func(context.Context, io.Writer) error,
) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		parsed, err := recipients.loadRecipients()
		if err != nil {
			return err
		}
		sealed, err := age.Encrypt(w, parsed...)
		if err != nil {
			return fmt.Errorf("encrypting with age: %w", err)
		}
		if err := writePlain(ctx, sealed); err != nil {
			return err
		}
		return sealed.Close()
	}
}

// Check returns an error if a recipient is invalid.
func (r Recipients) Check() error {
	_, err := r.loadRecipients()
	return err
}

// AgeHeader describes the header of a file that is encrypted with age. No identity is needed to
// read the header.
type AgeHeader struct{ Recipients []string } // type of each recipient: X25519, mlkem768x25519 ...

// ReadAgeHeader returns the header of a file that is encrypted with age, or nil for other files.
func ReadAgeHeader(r io.Reader) (*AgeHeader, error) {
	head := make([]byte, len(ageMagic))
	n, _ := io.ReadFull(r, head) // a shorter file is not an age file
	switch {
	case strings.HasPrefix(ageArmor, string(head[:n])) && n == len(head):
		return nil, errors.New("the file has age's armored format: decrypt it with 'age --decrypt' first")
	case string(head[:n]) != ageMagic:
		return nil, nil
	}
	header, err := age.ExtractHeader(io.LimitReader(io.MultiReader(bytes.NewReader(head), r), maxAgeHeader))
	if err != nil {
		return nil, fmt.Errorf("the header of the age file is invalid: %w", err)
	}
	s := &AgeHeader{}
	for line := range strings.Lines(string(header)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == "->" {
			s.Recipients = append(s.Recipients, words[1])
		}
	}
	if len(s.Recipients) > maxRecipients {
		return nil, fmt.Errorf("the file is encrypted for %d recipients, more than %d",
			len(s.Recipients), maxRecipients)
	}
	return s, nil
}

// Open returns the content of a backup file. If the file is encrypted with age, inside is the
// decrypted content, and sealed describes the recipients. Otherwise inside is f, and sealed is nil.
// identity is the path of a file of age identities. Open returns ErrNeedsIdentity if the path is
// empty and the file is encrypted. It returns ErrOtherIdentity if no identity decrypts the file.
func Open(f *os.File, identity string) (inside io.ReadSeeker, sealed *AgeHeader, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	sealed, err = ReadAgeHeader(io.NewSectionReader(f, 0, info.Size()))
	if err != nil || sealed == nil {
		return f, nil, err
	}
	if identity == "" {
		return nil, sealed, fmt.Errorf("%w for %s: --identity must name a file with one of their identities",
			ErrNeedsIdentity, sealed)
	}
	identities, err := readIdentities(identity)
	if err != nil {
		return nil, sealed, err
	}
	plain, size, err := age.DecryptReaderAt(f, info.Size(), identities...)
	var none *age.NoIdentityMatchError
	if errors.As(err, &none) {
		return nil, sealed, fmt.Errorf("%w: it is encrypted for %s, and %s has none of their identities",
			ErrOtherIdentity,
			sealed, identity)
	}
	if err != nil {
		return nil, sealed, fmt.Errorf("decrypting it with %s: %w", identity, err)
	}
	return io.NewSectionReader(plain, 0, size), sealed, nil
}

// String returns the number and the types of the recipients.
func (s *AgeHeader) String() string {
	kinds := slices.Compact(slices.Sorted(slices.Values(s.Recipients)))
	noun := "recipients"
	if len(s.Recipients) == 1 {
		noun = "recipient"
	}
	return fmt.Sprintf("%d %s (%s)", len(s.Recipients), noun, strings.Join(kinds, ", "))
}

// readIdentities reads a file of age identities. It returns an error if users other than the owner
// may read the file. Errors never contain the file's content.
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
		return nil, fmt.Errorf("--identity: %s: want identities of age, AGE-SECRET-KEY-1..., one per line, "+
			"unencrypted",
			path)
	}
	return out, nil
}
